"""Numbers of services, and what `specdec ray up` changes of a running deployment: pure functions, without a cluster."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from specdec.ray.config import RaySettings
from specdec.ray.placing import ActorSpec, Changes, addresses_of, changes, ended_for, plan, settings_on, sorted_roles

SERVICES = {"target": {"model": "t", "tensor_parallel_size": 2}, "draft": {"model": "d"}, "gateway": {}}
RUN_COUNT = 300


def planned(targets: int, drafts: int, coordinators: int, **others: Any) -> list[ActorSpec]:
    """The actors of a file with these numbers."""
    numbers = {"targets": targets, "drafts": drafts, "coordinators": coordinators}
    return plan(RaySettings(**{"insecure": True, **SERVICES, "placement": numbers, **others}))


def running(actors: list[ActorSpec]) -> dict[str, ActorSpec | None]:
    """What the actors say of themselves once they run."""
    return {actor.role: actor for actor in actors}


def roles(changed: Changes) -> tuple[list[str], list[str], list[list[str]]]:
    """The roles of each change."""
    replaced = [[actor.role for actor in unit] for unit in changed.replaced]
    return list(changed.removed), [actor.role for actor in changed.added], replaced


def test_numbers_become_groups_and_ports():
    """Claim: coordinators are in turn beside targets, with a gateway that reaches those of its node; all groups have
    the same places; a further service of a kind has ports 10 above."""
    actors = planned(2, 2, 3, target={"model": "t", "metrics_address": "[::]:9464", "health_address": "[::]:0"})
    own = {actor.role: actor for actor in actors}
    groups = {role: actor.group.name for role, actor in own.items() if actor.group is not None}
    assert groups == {
        **dict.fromkeys(("target-0", "coordinator-0", "coordinator-2", "gateway-0"), "target-0"),
        **dict.fromkeys(("target-1", "coordinator-1", "gateway-1"), "target-1"),
    }
    assert len({actor.group.bundles for actor in actors if actor.group is not None}) == 1
    places = [(actor.group.name, actor.bundle) for actor in actors if actor.group is not None]
    assert len(set(places)) == len(places)
    ports = {role: actor.settings.port for role, actor in own.items()}
    assert ports["target-1"] - ports["target-0"] == ports["draft-1"] - ports["draft-0"] == 10
    assert ports["coordinator-2"] - ports["coordinator-0"] == 20 and len(set(ports.values())) == len(ports)
    assert own["target-1"].settings.metrics_address == "[::]:9474"
    assert own["target-1"].settings.health_address == "[::]:0"
    gateway = settings_on(own["gateway-0"], "10.0.0.7")
    assert gateway.address == ("10.0.0.7:50051", "10.0.0.7:50071")


def test_ranks_of_two_targets_meet_apart():
    """Claim: the ranks of each target meet at a port of their own: two targets may be on one node."""
    ports = {actor.index: settings_on(actor, "h").master_port for actor in planned(2, 1, 1) if actor.rank}
    assert ports == {0: 50054, 1: 50064}


def test_addresses_are_those_of_actors_with_a_node():
    """Claim: a coordinator finds each target and draft at the node of its actor, by number; ranks, other services and
    actors without a node are none."""
    actors = planned(12, 1, 1)
    reaches = next(actor for actor in actors if actor.command == "coordinator").reaches
    hosts = {"target-10": "c", "target-2": "b", "target-1": "", "target-0": "a", "target-0-rank-1": "a", "draft-0": "d"}
    hosts |= {"coordinator-0": "a", "gateway-0": "a"}
    found = [addresses_of(kind, hosts) for kind in reaches]
    assert found == [["a:50052", "b:50072", "c:50152"], ["d:50053"]]


def test_scaling_out_replaces_nothing():
    """Claim: more targets, drafts and coordinators in proportion leave every running actor as it is."""
    before = planned(2, 1, 2)
    removed, added, replaced = roles(changes(planned(3, 2, 3), running(before)))
    assert (removed, replaced) == ([], [])
    assert added == ["target-2", "target-2-rank-1", "coordinator-2", "gateway-2", "draft-1"]
    assert roles(changes(before, running(before))) == ([], [], [])


def test_scaling_in_removes_the_last_ones():
    """Claim: fewer of a kind ends those with the highest numbers, and nothing else."""
    after = planned(2, 1, 2)
    removed, added, replaced = roles(changes(after, running(planned(3, 2, 3))))
    assert (added, replaced) == ([], [])
    assert sorted_roles(removed) == ["coordinator-2", "draft-1", "gateway-2", "target-2", "target-2-rank-1"]


def test_a_changed_service_is_replaced_one_by_one():
    """Claim: of a changed section each service is replaced alone, a target with its ranks, drafts first; what is beside
    a target stays."""
    before = running(planned(2, 2, 2))
    target = {"model": "t", "tensor_parallel_size": 2, "max_num_seqs": 7}
    after = planned(2, 2, 2, target=target, draft={"model": "d", "max_num_seqs": 7})
    removed, added, replaced = roles(changes(after, before))
    assert (removed, added) == ([], [])
    ranks = [[f"target-{index}", f"target-{index}-rank-1"] for index in range(2)]
    assert replaced == [["draft-0"], ["draft-1"], *ranks]


def test_a_changed_group_is_replaced_with_all_that_is_in_it():
    """Claim: other resources of a target replace its group: its actors with those beside it; so do more coordinators
    than the groups have places for."""
    before = running(planned(1, 1, 1))
    place = {"target": {"cpus": 2}, "targets": 1, "coordinators": 1}
    whole = ["target-0", "target-0-rank-1", "coordinator-0", "gateway-0"]
    assert roles(changes(planned(1, 1, 1, placement=place), before))[2] == [whole]
    removed, added, replaced = roles(changes(planned(1, 1, 2), before))
    assert (removed, added) == ([], []) and sorted(replaced[0]) == sorted([*whole, "coordinator-1"])


def test_another_version_or_silence_is_replaced():
    """Claim: an actor of another version of specdec is replaced, and so is one that does not say what it is."""
    wanted = planned(2, 1, 2)
    known = running(wanted) | {"draft-0": replace(wanted[-1], version="0.0.1"), "coordinator-1": None}
    assert roles(changes(wanted, known)) == ([], [], [["draft-0"], ["coordinator-1"]])


def check_places(known: dict[str, ActorSpec | None]) -> None:
    """Each place has one actor at most, and each name one group."""
    grouped = [(spec.group, spec.bundle) for spec in known.values() if spec is not None and spec.group is not None]
    assert len({(group.name, bundle) for group, bundle in grouped}) == len(grouped)
    assert len({(group.name, group.bundles) for group, _ in grouped}) == len({group.name for group, _ in grouped})


def test_from_any_numbers_to_any_others():
    """Claim: whatever ran, once the changes are done the actors are the wanted ones, each is created once, and no place
    of a group is ever taken twice, nor one of a group of another shape. Conclusive: the changes are carried out on
    random pairs of files as `update` does it; the groups' names and shapes are looked at after each."""
    draw = random.Random(0)
    for _ in range(RUN_COUNT):
        before, wanted = (planned(*(draw.randint(1, 4) for _ in range(3))) for _ in range(2))
        known = running(before)
        todo = changes(wanted, known)
        for role in todo.removed:
            del known[role]
        known |= running(list(todo.added))
        check_places(known)
        for unit in todo.replaced:
            known = {role: one for role, one in known.items() if role not in ended_for(unit, known)}
            known |= running(list(unit))
            check_places(known)
        assert known == running(wanted)
        touched = [actor.role for actor in todo.added] + [actor.role for unit in todo.replaced for actor in unit]
        assert len(set(touched)) == len(touched)
