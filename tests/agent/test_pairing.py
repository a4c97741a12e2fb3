"""PAIR, CONTROLLERS and HELLO against a real agent: every way in, and every refusal."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from flare.agent.pairing import accepts_first, allow_first, install_code, read_code
from flare.errors import (
    ConflictError,
    ForbiddenError,
    PairingError,
    RemoteProtocolError,
    UnreachableError,
    UsageError,
)
from flare.identity import Identity
from flare.paths import Paths
from flare.trust.join_code import JOIN_CODE_LIFETIME, decode, generate, hmac_key, node_proof
from flare.wire.messages import Controllers, Metrics, Pair, Status
from tests.agent.world import Agent, Peer, drive, wait_for


def test_pairing_with_a_code(agent: Agent, controller: Peer) -> None:
    code = agent.join_code()

    async def scenario() -> None:
        async with controller.session(agent) as session:
            assert session.hello.node is None  # a stranger hears the protocol and the key alone
            assert session.hello.controllers_revision is None
            assert session.hello.executable is None
        reply = await controller.pair(agent, code)
        assert reply.node.name
        assert reply.address.startswith("127.0.0.1:")
        async with controller.session(agent) as session:
            assert session.hello.node == reply.node
            assert session.hello.controllers_revision == 1
            assert session.hello.executable == str(agent.launcher)
            status = await session.request(Status())
            assert status.public_key == session.peer_key == agent.identity.public_key
            assert status.controllers_revision == 1

    drive(scenario())
    assert "paired with the controller workstation" in agent.log()


def test_both_sides_prove_the_code(agent: Agent, controller: Peer) -> None:
    code = agent.join_code()

    async def scenario() -> None:
        async with controller.session(agent) as session:
            from flare.trust.join_code import controller_proof

            key = hmac_key(decode(code.lower().replace("-", "")))
            reply = await session.request(
                Pair(
                    name="workstation",
                    controllers=controller.controllers.chain,
                    proof=controller_proof(key, session.handshake_hash),
                )
            )
            assert reply.proof == node_proof(key, session.handshake_hash)

    drive(scenario())


def test_a_wrong_code_costs_a_second_and_does_not_use_up_the_right_one(
    agent: Agent, controller: Peer
) -> None:
    code = agent.join_code()
    started = time.monotonic()
    with pytest.raises(PairingError) as refusal:
        drive(controller.pair(agent, generate()))
    assert time.monotonic() - started >= 1.0
    assert "proof" not in str(refusal.value)  # the reason stands in the node's log alone
    assert "its proof of the code is wrong" in agent.log()
    assert "This node refused to pair" not in agent.log()  # which sends to this log for the reason
    drive(controller.pair(agent, code))


def test_a_proof_of_another_session_does_not_pass(agent: Agent, controller: Peer) -> None:
    from flare.trust.join_code import controller_proof

    code = agent.join_code()
    with pytest.raises(PairingError):
        drive(controller.pair(agent, code, proof=controller_proof(hmac_key(decode(code)), bytes(32))))


@pytest.mark.parametrize("sent", [True, False])
def test_no_invitation(agent: Agent, controller: Peer, sent: bool) -> None:
    with pytest.raises(PairingError):
        drive(controller.pair(agent, generate() if sent else None))
    assert ("it sent a code, but this node has none" if sent else "this node has no code") in agent.log()


def test_a_node_with_a_code_wants_it(agent: Agent, controller: Peer) -> None:
    agent.join_code()
    with pytest.raises(PairingError):
        drive(controller.pair(agent, None))
    assert "it sent no code" in agent.log()


def test_a_paired_node_refuses_others_and_answers_the_same_again(agent: Agent, controller: Peer) -> None:
    code = agent.join_code()
    first = drive(controller.pair(agent, code))
    again = drive(controller.pair(agent, code))  # the answer may have been lost
    assert again.node == first.node
    with pytest.raises(PairingError):
        drive(Peer(2, "thief").pair(agent, code))
    with pytest.raises(PairingError):
        drive(controller.pair(agent, generate()))
    with pytest.raises(PairingError):
        drive(controller.pair(agent, None))
    assert agent.log().count("this node is paired") == 2
    code = agent.join_code()  # a new invitation does not open a paired node
    with pytest.raises(PairingError):
        drive(Peer(2, "thief").pair(agent, code))


def test_the_same_pairing_survives_a_restart(agent: Agent, controller: Peer) -> None:
    code = agent.join_code()
    drive(controller.pair(agent, code))
    assert agent.stop() == 0
    agent.start()
    drive(controller.pair(agent, code))
    drive(controller.ask(agent, Status()))


def test_accept_first(new_agent: Callable[..., Agent], controller: Peer) -> None:
    agent = new_agent().start("--accept-first")
    assert agent.paths.accept_first_file.exists()
    assert drive(controller.pair(agent, None)).proof is None
    assert not agent.paths.accept_first_file.exists()
    drive(controller.pair(agent, None))  # again, within ten minutes
    with pytest.raises(PairingError):
        drive(Peer(2, "late").pair(agent, None))


@pytest.mark.parametrize("killed", [False, True])
def test_accept_first_ends_with_the_run_it_was_given_to(
    new_agent: Callable[..., Agent], controller: Peer, killed: bool
) -> None:
    agent = new_agent().start("--accept-first")
    told = agent.command("agent", "status").stdout
    assert "Controllers:  none; the first one that connects until " in told
    assert "`flare agent reset` ends that" in told
    assert json.loads(agent.command("agent", "status", "--json").stdout)["accepts_first_until"] > time.time()
    assert "will be obeyed (--accept-first); `flare agent reset` ends that" in agent.log()
    if killed:
        assert agent.stop(signal.SIGKILL) != 0
    else:
        assert agent.stop() == 0
        assert not agent.paths.accept_first_file.exists()
    agent.start()
    with pytest.raises(PairingError):
        drive(controller.pair(agent, None))
    assert "none; `flare agent join-code` prints a code" in agent.command("agent", "status").stdout


def test_an_installed_permission_outlives_a_run_and_is_told(
    new_agent: Callable[..., Agent], controller: Peer
) -> None:
    agent = new_agent()
    allow_first(agent.paths, time.time())
    agent.start()
    assert agent.stop() == 0
    agent.start()
    assert "will be obeyed (--accept-first)" in agent.log()
    drive(controller.pair(agent, None))


def test_accept_first_does_not_answer_a_code(new_agent: Callable[..., Agent], controller: Peer) -> None:
    agent = new_agent().start("--accept-first")
    with pytest.raises(PairingError):
        drive(controller.pair(agent, generate()))
    assert "it sent a code, but this node has none" in agent.log()


def test_a_set_that_does_not_verify(agent: Agent, controller: Peer) -> None:
    code = agent.join_code()
    other = Peer(2, "other")
    with pytest.raises(PairingError):
        drive(controller.pair(agent, code, controllers=other.controllers.chain))
    assert "does not list the key that it connected with" in agent.log()
    from dataclasses import replace

    forged = replace(controller.controllers.chain[0], signature=bytes(64))
    with pytest.raises(PairingError):
        drive(controller.pair(agent, code, controllers=(forged,)))
    assert "its controller set does not verify" in agent.log()
    drive(controller.pair(agent, code))  # neither used up the code


def test_one_pair_a_session(agent: Agent, controller: Peer) -> None:
    agent.join_code()

    async def scenario() -> None:
        async with controller.session(agent) as session:
            request = Pair(name="x", controllers=controller.controllers.chain, proof=None)
            with pytest.raises(PairingError):
                await session.request(request)
            with pytest.raises((UnreachableError, RemoteProtocolError)):
                await session.request(request)

    drive(scenario())


def test_strangers_may_only_pair(agent: Agent) -> None:
    stranger = Peer(9)
    for request in (Status(), Metrics(), Controllers(records=stranger.controllers.chain)):
        with pytest.raises(ForbiddenError):
            drive(stranger.ask(agent, request))


def test_controller_set_moves_on_and_revokes(paired: Agent, controller: Peer) -> None:
    laptop = Peer(2, "laptop")
    second = controller.controllers.with_added(controller.identity, "laptop", laptop.key)
    third = second.with_removed(laptop.identity, "workstation")

    async def scenario() -> None:
        reply = await controller.ask(paired, Controllers(records=second.after(1)))
        assert reply.revision == 2
        await laptop.ask(paired, Status())
        async with controller.session(paired) as open_session:
            await open_session.request(Status())
            assert (await laptop.ask(paired, Controllers(records=third.after(2)))).revision == 3
            with pytest.raises(UnreachableError):  # ended while it was open
                await open_session.request(Status(), timeout=60)
        with pytest.raises(ForbiddenError):
            await controller.ask(paired, Status())
        # A record that the removed key signs is refused.
        fourth = third.with_added(laptop.identity, "x", Peer(3).key)
        assert (await laptop.ask(paired, Controllers(records=fourth.after(3)))).revision == 4

    drive(scenario())
    assert paired.stop() == 0
    paired.start()
    assert drive(laptop.ask(paired, Status())).controllers_revision == 4


def test_a_controller_that_removes_itself_hears_the_answer(paired: Agent, controller: Peer) -> None:
    laptop = Peer(2, "laptop")
    second = controller.controllers.with_added(controller.identity, "laptop", laptop.key)
    third = second.with_removed(controller.identity, "workstation")

    async def scenario() -> None:
        async with controller.session(paired) as session:
            assert (await session.request(Controllers(records=third.after(1)))).revision == 3
            with pytest.raises((UnreachableError, ForbiddenError)):
                await session.request(Status(), timeout=60)

    drive(scenario())


def test_two_writers_of_one_revision(paired: Agent, controller: Peer) -> None:
    one = controller.controllers.with_added(controller.identity, "a", Peer(2).key)
    two = controller.controllers.with_added(controller.identity, "b", Peer(3).key)
    drive(controller.ask(paired, Controllers(records=one.after(1))))
    with pytest.raises(ConflictError, match="written by another controller"):
        drive(controller.ask(paired, Controllers(records=two.after(1))))


def test_reset_makes_a_running_agent_unpaired(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(Status())
            done = paired.command("agent", "reset")
            assert "this node is unpaired" in done.stdout
            with pytest.raises((UnreachableError, ForbiddenError)):
                await session.request(Status(), timeout=60)

    drive(scenario())
    wait_for(lambda: "this node is unpaired" in paired.log())
    with pytest.raises(ForbiddenError):
        drive(controller.ask(paired, Status()))
    code = paired.join_code()
    drive(Peer(5, "new").pair(paired, code))


def test_a_damaged_controller_file_obeys_nobody(paired: Agent, controller: Peer) -> None:
    paired.paths.controllers_file.write_text("nonsense")
    with pytest.raises(ForbiddenError):
        drive(controller.ask(paired, Status()))
    assert "nobody is obeyed until this is repaired" in paired.log()
    paired.stop()
    done = paired.command("agent", "--listen", "127.0.0.1:0")
    assert done.returncode == 3
    assert "is damaged" in done.stderr
    assert "flare agent reset" in done.stderr


@pytest.mark.parametrize(("mode", "rights"), [(0o644, "read"), (0o666, "read and changed")])
def test_a_controller_file_that_is_open_to_others_is_not_called_damaged(
    paired: Agent, mode: int, rights: str
) -> None:
    path = paired.paths.controllers_file
    path.chmod(mode)
    paired.stop()
    for words in (("agent", "--listen", "127.0.0.1:0"), ("agent", "status")):
        done = paired.command(*words)
        assert done.returncode == 5
        assert f"can be {rights} by others (mode {mode:04o}). Run `chmod 600 {path}`" in done.stderr
        assert "damaged" not in done.stderr
        assert "backup" not in done.stderr
    path.chmod(0o600)
    paired.start()


def test_codes_expire(tmp_path: object) -> None:
    paths = Paths.from_environment({"HOME": str(tmp_path)})
    now = 1_800_000_000.0
    expires = install_code(paths, generate(), now)
    assert expires == now + JOIN_CODE_LIFETIME
    assert read_code(paths.join_code_file, now + JOIN_CODE_LIFETIME - 1) is not None
    assert read_code(paths.join_code_file, now + JOIN_CODE_LIFETIME) is None
    assert not paths.join_code_file.exists()
    install_code(paths, generate(), now)
    assert read_code(paths.join_code_file, now - 3600) is None  # the clock was set back
    allow_first(paths, now)
    assert accepts_first(paths.accept_first_file, now + JOIN_CODE_LIFETIME - 1) == now + JOIN_CODE_LIFETIME
    assert not accepts_first(paths.accept_first_file, now + JOIN_CODE_LIFETIME)
    assert not paths.accept_first_file.exists()


def test_damaged_invitations_invite_nobody(tmp_path: object) -> None:
    paths = Paths.from_environment({"HOME": str(tmp_path)})
    now = 1_800_000_000.0
    install_code(paths, generate(), now)
    os.chmod(paths.join_code_file, 0o644)  # noqa: PTH101
    assert read_code(paths.join_code_file, now) is None
    paths.accept_first_file.write_text("soon")
    paths.accept_first_file.chmod(0o600)
    assert not accepts_first(paths.accept_first_file, now)
    with pytest.raises(UsageError, match="no join code"):
        install_code(paths, "AAAA", now)


def test_join_code_keeps_no_code(agent: Agent) -> None:
    code = agent.join_code()
    kept = agent.paths.join_code_file.read_text()
    assert json.loads(kept)["key"] == hmac_key(decode(code)).hex()
    assert code not in kept
    assert oct(agent.paths.join_code_file.stat().st_mode & 0o777) == "0o600"
    assert Identity.load(agent.paths.node_key).fingerprint == agent.fingerprint
