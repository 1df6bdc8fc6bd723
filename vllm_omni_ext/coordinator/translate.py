"""Between the words of `members` and the messages of `wire.coordination`."""

from __future__ import annotations

from vllm_omni_ext.coordinator import members
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire import coordination as wire


def event(message: wire.ToCoordinator, at: float) -> members.Event:
    """What a replica's message, read at `at`, means to the coordinator."""
    match message:
        case wire.Register():
            descriptor = members.Descriptor(
                instance=message.instance,
                stage=message.stage,
                model=message.model,
                config_hash=message.config_hash,
                version=message.version,
                address=message.address,
            )
            return members.Register(descriptor, at, message.index, message.epoch)
        case wire.Heartbeat():
            return members.Heartbeat(member(message.member), load(message.load), at, message.proof)
        case wire.Leave():
            return members.Leave(member(message.member), at, message.drain, message.proof)


def reply(action: members.Reply) -> wire.ToReplica:
    """The coordinator's answer."""
    match action:
        case members.Admit():
            return wire.Admitted(member=bearer(action.member), interval_s=action.interval_s)
        case members.Refuse():
            return wire.Refused(reason=action.reason)
        case members.NotYet():
            return wire.NotYet()
        case members.RegisterAgain():
            return wire.RegisterAgain(member=bearer(action.member))
        case members.Released():
            return wire.Released(member=bearer(action.member))


def registration(replica: members.Descriptor, index: int | None, epoch: int | None) -> wire.Register:
    """A replica's wish to join."""
    return wire.Register(
        instance=replica.instance,
        stage=replica.stage,
        model=replica.model,
        config_hash=replica.config_hash,
        version=replica.version,
        address=replica.address,
        index=index,
        epoch=epoch,
    )


def published(view: members.View) -> wire.Published:
    """A view to send."""
    return wire.Published(
        generation=view.generation,
        settled=view.settled,
        timeout_s=view.timeout_s,
        replicas=tuple(
            wire.Standing(
                member=bearer(entry.member),
                state=entry.state.value,
                load=None if entry.load is None else report(entry.load),
                address=entry.address,
            )
            for entry in view.replicas
        ),
        dropped=view.dropped,
    )


def view(message: wire.Published) -> members.View:
    """A view that was sent; `Malformed` if a state is unknown."""
    return members.View(
        generation=message.generation,
        settled=message.settled,
        timeout_s=message.timeout_s,
        replicas=tuple(
            members.Entry(
                member(standing.member),
                _state(standing.state),
                None if standing.load is None else load(standing.load),
                standing.address,
            )
            for standing in message.replicas
        ),
        dropped=message.dropped,
    )


def bearer(name: members.Member) -> wire.Bearer:
    """A member to send."""
    return wire.Bearer(name.id.stage, name.id.index, name.epoch)


def member(name: wire.Bearer) -> members.Member:
    """A member that was sent."""
    return members.Member(ReplicaId(name.stage, name.index), name.epoch)


def report(value: Load) -> wire.Load:
    """A load to send; what an engine may say beyond the bounds is cut."""
    return wire.Load(
        max(0, value.waiting), max(0, value.running), min(1.0, max(0.0, value.kv_usage)), max(0, value.report)
    )


def load(value: wire.Load) -> Load:
    """A load that was sent."""
    return Load(value.waiting, value.running, value.kv_usage, value.report)


def _state(text: str) -> members.State:
    try:
        return members.State(text)
    except ValueError as error:
        raise wire.Malformed(f"'{text}' is no state of a replica") from error
