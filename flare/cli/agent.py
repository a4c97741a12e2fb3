"""`flare agent`: run this node's agent, invite controllers, install it as a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

import click

from flare.cli.main import CONTEXT, HelpfulGroup

if TYPE_CHECKING:
    from flare.paths import Paths


@click.group(cls=HelpfulGroup, invoke_without_command=True, context_settings=CONTEXT)
@click.option(
    "--listen",
    metavar="ADDR",
    help="Address and port, or a port; default: config.toml's, or [::]:29900. Port 0: any free one.",
)
@click.option("--name", metavar="NAME", help="The node's name; default: the host name.")
@click.option(
    "--accept-first", is_flag=True, help="Accept the first controller that connects while this runs."
)
@click.pass_context
def agent(context: click.Context, listen: str | None, name: str | None, accept_first: bool) -> None:
    """Run this node's agent in the foreground, or manage it.

    \b
    flare agent --listen [::]:29900    run it here
    flare agent install                run it as a service of this account
    flare agent join-code              print a code that pairs one controller
    """
    if context.invoked_subcommand is not None:
        given = [flag for flag, value in (("--listen", listen), ("--name", name)) if value is not None]
        if accept_first:
            given.append("--accept-first")
        if given:
            raise click.UsageError(f"{given[0]} belongs behind `{context.invoked_subcommand}`, or alone.")
        return
    # Nothing may run a thread or an event loop before the agent has forked its spawner.
    from flare.agent.service import AgentOptions, run_agent
    from flare.paths import Paths

    run_agent(Paths.from_environment(), AgentOptions(listen, name, accept_first))


@agent.command("join-code")
@click.option(
    "--code-file",
    type=click.File("r"),
    help="Install the code in this file (- for standard input) instead of making one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def join_code(code_file: TextIO | None, as_json: bool) -> None:
    """Make a one-time code that pairs one controller with this node, good for 24 hours."""
    import time

    from flare.agent.pairing import install_code, read_code
    from flare.cli.output import warn
    from flare.paths import Paths
    from flare.trust.join_code import decode, format_code, generate

    paths = Paths.from_environment()
    code = format_code(decode(_first_line(code_file))) if code_file is not None else generate()
    older = read_code(paths.join_code_file, time.time())
    expires = install_code(paths, code, time.time())
    _print_invitation(paths, code, expires, as_json)
    newer = read_code(paths.join_code_file, time.time())
    if older is not None and older.used_by is None and newer is not None and older.key != newer.key:
        warn("the code that was made here before pairs nobody any more: only the newest one does.")


@agent.command("install")
@click.option("--listen", metavar="ADDR", help="Address and port; default: config.toml's, or [::]:29900.")
@click.option("--name", metavar="NAME", help="The node's name; default: the host name.")
@click.option(
    "--join-code", "code", metavar="CODE|-", help="Install this code; `-` reads it from standard input."
)
@click.option(
    "--accept-first", is_flag=True, help="Pair with the first controller that connects, without a code."
)
@click.option("--dry-run", is_flag=True, help="Print the unit file and the commands, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def install(
    listen: str | None, name: str | None, code: str | None, accept_first: bool, dry_run: bool, as_json: bool
) -> None:
    """Run the agent as a systemd service of this account, from now on and after every boot.

    Restarting the service ends the ranks that run now. A code for pairing is printed unless this node is
    paired already.
    """
    import sys
    import time

    from flare.agent import install as installation
    from flare.agent.pairing import allow_first, install_code
    from flare.agent.service import installed_executable, listen_address
    from flare.cli.output import print_json, say, warn
    from flare.errors import UsageError
    from flare.identity import Identity
    from flare.paths import Paths, check_name
    from flare.settings import Settings
    from flare.trust.join_code import decode, format_code, generate

    paths = Paths.from_environment()
    if code is not None and accept_first:
        raise UsageError(
            "--join-code and --accept-first exclude each other: the first proves, the second trusts."
        )
    settings = Settings.load(paths)
    listen_address(paths, settings, listen)
    if listen is None:
        listen = settings.agent.listen
    options = ["--listen", listen]
    if name is not None:
        options += ["--name", check_name(name, "node name")]
    unit = installation.unit_path(installation.config_home())
    text = installation.unit_text(installed_executable()[0], options)
    if code == "-":
        code = sys.stdin.readline().strip()
    if code is not None:
        code = format_code(decode(code))
    if dry_run:
        commands = [" ".join(step.command) for step in installation.STEPS]
        if as_json:
            print_json({"unit": str(unit), "text": text, "commands": commands})
            return
        say(f"Would write {unit}:\n\n{text}")
        say("Would run:\n" + "\n".join(f"  {command}" for command in commands))
        return
    installation.require_systemd(listen)
    Identity.load_or_create(paths.node_key, "The node key")
    paired = paths.controllers_file.exists()
    if code is None and not accept_first and not paired:
        code = generate()
    expires = 0
    if code is not None:
        expires = install_code(paths, code, time.time())
    elif accept_first and not paired:
        expires = allow_first(paths, time.time())
    installation.write_unit(unit, text)
    warnings = installation.run_steps()
    if not as_json:
        say(f"Installed {unit}; the agent runs.")
    _print_invitation(paths, code, expires, as_json)
    for warning in warnings:
        warn(warning)


@agent.command("reset")
def reset() -> None:
    """Remove the authorized controllers and the pairing code: the node becomes unpaired.

    The node key, cached files and running groups stay.
    """
    from flare.agent.authority import remove_controllers
    from flare.agent.pairing import remove_invitations
    from flare.cli.output import say
    from flare.paths import Paths

    paths = Paths.from_environment()
    was_paired = remove_controllers(paths.controllers_file)
    remove_invitations(paths)
    if was_paired:
        say("The authorized controllers were removed: this node is unpaired. Running groups go on.")
    else:
        say("This node was not paired; codes that were not used are gone.")
    say("Pair it again: `flare agent join-code`, then the command that it prints.")


@agent.command("pair", short_help="Pair nodes with this host's controller key.")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option(
    "--code",
    metavar="CODE|-",
    help="The join code, for all HOSTs; `-` reads a line for each HOST, or one for all, from stdin.",
)
@click.option("--name", metavar="NAME", help="Call the node this instead of its own name (one HOST only).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def pair(hosts: tuple[str, ...], code: str | None, name: str | None, as_json: bool) -> None:
    """Pair nodes with this host's controller key; needs no cluster and makes none.

    The same as `flare orbit pair`.
    """
    from flare.cli.orbit_pair import pair_hosts

    pair_hosts(hosts, code, name, as_json)


@agent.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(as_json: bool) -> None:
    """Show this node's name, fingerprint and controllers, and whether its agent runs."""
    import time
    from datetime import datetime

    from flare.agent.authority import read_controllers
    from flare.agent.lock import running_agent
    from flare.agent.pairing import accepts_first, end_run_permission
    from flare.agent.service import default_name
    from flare.cli.output import print_json, say
    from flare.errors import NotFoundError
    from flare.identity import Identity
    from flare.paths import Paths

    paths = Paths.from_environment()
    if not paths.node_key.exists():
        raise NotFoundError(
            "No agent ever ran here for this account. On a serving host run `flare agent install`, or, "
            "without systemd, `flare agent --listen '[::]:29900'`. A host that only runs `flare orbit` needs "
            "no agent: `flare orbit status` shows its nodes."
        )
    identity = Identity.load(paths.node_key, "The node key")
    running = running_agent(paths.agent_folder / "lock")
    found = read_controllers(paths.controllers_file) if paths.controllers_file.exists() else None
    controllers = found.controllers if found is not None else ()
    name = running.name if running else default_name()
    if running is None:
        end_run_permission(paths)  # a run that was killed left it
    until = None if found is not None else accepts_first(paths.accept_first_file, time.time())
    if as_json:
        print_json(
            {
                "name": name,
                "fingerprint": identity.fingerprint,
                "public_key": identity.public_key.hex(),
                "accepts_first_until": until,
                "running": None if running is None else {"pid": running.pid, "listen": list(running.listen)},
                "controllers_revision": found.revision if found is not None else 0,
                "controllers": [
                    {"name": entry.name, "fingerprint": entry.fingerprint} for entry in controllers
                ],
            }
        )
        return
    say(f"Node:         {name}")
    say(f"Fingerprint:  {identity.fingerprint}")
    where = f"process {running.pid}, on {' and '.join(running.listen)}" if running else "not running"
    say(f"Agent:        {where}")
    if until is not None:
        moment = f"{datetime.fromtimestamp(until).astimezone():%Y-%m-%d %H:%M %Z}"
        say(f"Controllers:  none; the first one that connects until {moment} is accepted.")
        say("              `flare agent reset` ends that, `flare agent join-code` asks for a code instead.")
    elif found is None:
        say("Controllers:  none; `flare agent join-code` prints a code that pairs one")
    for entry in controllers:
        say(f"Controller:   {entry.name}  {entry.fingerprint}")


def _first_line(file: TextIO) -> str:
    """Return what is in a code file; a code is never an argument, which others could see."""
    return file.read(4096).strip()


def _print_invitation(paths: Paths, code: str | None, expires: int, as_json: bool) -> None:
    """Print what pairs this node: the code, who it is, and the next command to type on the controller.

    Args:
        code: None where none was made: the node is paired, or accepts the first controller.
        expires: Unix seconds; 0 where nothing expires.
    """
    import socket
    from datetime import datetime

    from flare.agent.lock import running_agent
    from flare.agent.service import WILDCARDS, default_name, listen_address, parse_listen
    from flare.cli.output import print_json, say, warn
    from flare.identity import Identity
    from flare.session import format_address
    from flare.settings import DEFAULT_PORT, Settings

    identity = Identity.load_or_create(paths.node_key, "The node key")
    running = running_agent(paths.agent_folder / "lock")
    paired = paths.controllers_file.exists()
    if running and running.listen:
        bound, port = parse_listen(running.listen[0])
    else:
        bound, port = listen_address(paths, Settings.load(paths), None)
    host = socket.gethostname() if bound in WILDCARDS else bound
    if port not in (DEFAULT_PORT, 0):
        host = format_address(host, port)
    name = running.name if running else default_name()
    command = f"flare orbit pair {host}" + ("" if code is None else " --code -")
    if as_json:
        print_json(
            {
                "code": code,
                "expires": expires or None,
                "name": name,
                "fingerprint": identity.fingerprint,
                "public_key": identity.public_key.hex(),
                "command": command,
                "paired": paired,
                "running": running is not None,
            }
        )
        return
    moment = f"{datetime.fromtimestamp(expires).astimezone():%Y-%m-%d %H:%M %Z}"
    if code is not None:
        say(f"Join code:    {code}")
        say(f"Good until:   {moment}, for one pairing")
    say(f"Node:         {name}")
    say(f"Fingerprint:  {identity.fingerprint}")
    if paired:
        warn("this node is paired already, so no code pairs it now. `flare agent reset` makes it unpaired.")
    elif code is not None:
        say("\nOn the controller, type this and then the code; compare the fingerprint that it prints:")
        say(f"  {command}")
    else:
        say(f"\nThe first controller that connects until {moment} is accepted. On the controller:")
        say(f"  {command}")
    if bound.startswith("127.") or bound in ("::1", "localhost"):
        warn(
            f"the agent listens on {bound} alone, which only this host reaches; "
            f"--listen '[::]:{port}' opens it."
        )
    if running is None:
        warn("no agent runs here yet. Start it: `flare agent install`, or `flare agent` in this terminal.")
