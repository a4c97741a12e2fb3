"""`flare completion`: the script that a shell sources."""

from __future__ import annotations

import click


@click.command(short_help="Print the shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell. Make the shell's folder first, then keep the script there.

    \b
    bash:  mkdir -p ~/.local/share/bash-completion/completions
           flare completion bash > ~/.local/share/bash-completion/completions/flare
    zsh:   mkdir -p ~/.zfunc     (and have it in fpath)
           flare completion zsh > ~/.zfunc/_flare
    fish:  mkdir -p ~/.config/fish/completions
           flare completion fish > ~/.config/fish/completions/flare.fish
    """
    from click.shell_completion import get_completion_class

    from flare.cli.main import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"There is no completion for {shell}.")
    click.echo(kind(cli, {}, "flare", "_FLARE_COMPLETE").source())
