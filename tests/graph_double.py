"""In place of graphs of a device: what is captured is called again over the same memory, and written down."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.decode_graphs import DecodeGraphs
from engine.graph_capture import GraphCapture


@dataclass
class RecordedGraphs(GraphCapture):
    """Graphs are numbered in the order of their capture."""

    num_captured: int = 0
    replayed: list[int] = field(default_factory=list)

    def capture(self, launch: Callable[[], None]) -> Callable[[], object]:
        launch()
        number = self.num_captured
        self.num_captured += 1

        def replay() -> None:
            self.replayed.append(number)
            launch()

        return replay


def sizes_in_order_of_capture(graphs: DecodeGraphs) -> list[tuple[int, bool]]:
    """Rows, and whether there are nodes, of each graph."""
    return [(b.num_rows, form.has_nodes) for b in reversed(graphs._buckets) for form in b.graphs]
