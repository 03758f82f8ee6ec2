"""Places the ranks of a group on Ray's nodes, rank 0 on the engine's own; tensor ranks of a stage beside each other.

The ranks of a stage are one bundle where a node has room for them, which Ray never divides; else each is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mllm_compile.errors import DeviceError

PLACED_S = 60.0  # Ray has found room so long after it was asked for

Bundle = dict[str, float]


@dataclass(frozen=True)
class Placement:
    """The places of a group.

    Attributes:
        group: Ray's placement group, which is to be removed.
        nodes: of each rank, its node's id; those of rank 0's node come first, and a node's ranks are together.
        bundles: of each rank, the number of its bundle.
    """

    group: Any
    nodes: tuple[str, ...]
    bundles: tuple[int, ...]

    @property
    def num_local(self) -> int:
        """Ranks on rank 0's node, with it."""
        return self.nodes.count(self.nodes[0])

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """The number of each rank's node, from 0 on."""
        order = list(dict.fromkeys(self.nodes))
        return tuple(order.index(node) for node in self.nodes)

    def spread(self, width: int) -> list[int]:
        """The stages whose ranks are on several nodes.

        Args:
            width: ranks of a stage.
        """
        starts = range(0, len(self.nodes), width)
        return [start // width for start in starts if len(set(self.nodes[start : start + width])) > 1]


def place(
    ray: Any, num_ranks: int, width: int, on_gpus: bool, tell: Callable[[str], None], within_s: float = PLACED_S
) -> Placement:
    """Reserves what the ranks take: a GPU for each, and a CPU for each but rank 0, whose process is there already.

    Args:
        width: ranks of a stage.
        tell: tells the operator that a stage is spread over nodes.
        within_s: Ray may take so long to find room, twice where no node has room for a stage.

    Raises:
        DeviceError: there is no room.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    here = next(name for name in nodes[own] if name.startswith("node:") and "__" not in name)
    for size in dict.fromkeys((width, 1)):
        bundles = [_bundle(size, on_gpus, here if number == 0 else None) for number in range(num_ranks // size)]
        if size > 1 and not _have_room(bundles, list(nodes.values())):
            continue  # as Ray would wait for what never comes
        placed = _placed(ray, bundles, own, within_s)
        if placed is None:
            continue
        group, of_bundle = placed
        order = sorted(range(len(bundles)), key=lambda bundle: (of_bundle[bundle] != own, of_bundle[bundle], bundle))
        in_order = tuple(bundle for bundle in order for _ in range(size))
        found = Placement(group, tuple(of_bundle[bundle] for bundle in in_order), in_order)
        if spread := found.spread(width):
            tell(
                f"Ray has no node with room for {width} ranks: the sums of stage{'s' if len(spread) > 1 else ''} "
                f"{', '.join(map(str, spread))} cross the network between nodes, which is slow. Set a smaller "
                "runtime.tensor_parallel_size and a larger pipeline_parallel_size"
            )
        return found
    kinds = ("GPU",) if on_gpus else ("CPU",)
    free = {kind: value for kind, value in ray.available_resources().items() if kind in kinds}
    needed = f"{num_ranks} GPUs" if on_gpus else f"{num_ranks - 1} CPUs beside the engine's"
    raise DeviceError(
        f"Ray has no room for {num_ranks} ranks after {within_s:.0f} s: they take {needed}, and its {len(nodes)} nodes "
        f"have {free} left. Add nodes, or set a smaller runtime.tensor_parallel_size or pipeline_parallel_size."
    )


def _bundle(num_ranks: int, on_gpus: bool, here: str | None) -> Bundle:
    """The resources that some ranks take, rank 0 among them where `here` is the resource of its host."""
    cpus = num_ranks - (here is not None)
    parts = {"CPU": cpus, "GPU": num_ranks if on_gpus else 0, here or "": 0.001 if here else 0}
    return {name: float(value) for name, value in parts.items() if value}


def _have_room(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> bool:
    """True if nodes that nothing else used would have room for all bundles, the first where its resource is."""
    left = [dict(node) for node in nodes]
    for bundle in bundles:
        for node in left:
            if all(node.get(name, 0.0) >= value for name, value in bundle.items()):
                for name, value in bundle.items():
                    node[name] -= value
                break
        else:
            return False
    return True


def _placed(ray: Any, bundles: list[Bundle], own: str, within_s: float) -> tuple[Any, Mapping[int, str]] | None:
    """The group, and each bundle's node; None: there is no room."""
    from ray.util import placement_group, placement_group_table

    # Nodes of one host have one resource of its address: only the label tells them apart.
    labels = [{"ray.io/node-id": own}, *[{}] * (len(bundles) - 1)]
    group: Any = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
    try:
        if group.wait(within_s):
            of_bundle = placement_group_table(group)["bundles_to_node_id"]
            return group, {int(bundle): str(node) for bundle, node in of_bundle.items()}
    except BaseException:  # also Ctrl-C
        give_back(group)
        raise
    give_back(group)
    return None


def give_back(group: Any) -> None:
    """Removes a placement group, and the actors in it."""
    from ray.util import remove_placement_group

    with suppress(Exception):  # of a Ray that has ended
        remove_placement_group(group)
