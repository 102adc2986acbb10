"""A chart of horizontal bars as SVG, written by hand so that nothing needs to be installed for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LABEL_WIDTH, BAR_WIDTH, TEXT_WIDTH = 150, 480, 130
BAR_HEIGHT, ROW_HEIGHT, TOP = 16, 26, 58
COLOURS = ("#2a6f97", "#a9d6e5", "#eeeeee")
STYLE = (
    "text { font: 12px sans-serif; fill: #222 } .title { font-size: 14px; font-weight: bold } .end { text-anchor: end }"
)


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    lengths: tuple[float, ...]
    """Ascending: each part reaches from the end of the one before to its own; at most three."""
    text: str
    """Behind the bar."""


def draw(title: str, parts: Sequence[str], bars: Sequence[Bar]) -> str:
    """parts: what the parts of each bar are. The longest bar is as wide as there is room."""
    longest = max(bar.lengths[-1] for bar in bars)
    body = [f'<text class="title" x="8" y="20">{escape(title)}</text>']
    x = 8
    for part, colour in zip(parts, COLOURS, strict=False):
        body.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        body.append(f'<text x="{x + 17}" y="42">{escape(part)}</text>')
        x += 40 + 7 * len(part)
    for i, bar in enumerate(bars):
        y = TOP + i * ROW_HEIGHT
        body.append(f'<text class="end" x="{LABEL_WIDTH - 8}" y="{y + 12}">{escape(bar.label)}</text>')
        start = 0.0
        for length, colour in zip(bar.lengths, COLOURS, strict=False):
            left, width = LABEL_WIDTH + BAR_WIDTH * start / longest, BAR_WIDTH * (length - start) / longest
            body.append(f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>')
            start = length
        end = LABEL_WIDTH + BAR_WIDTH * start / longest + 6
        body.append(f'<text x="{end:.1f}" y="{y + 12}">{escape(bar.text)}</text>')
    width, height = LABEL_WIDTH + BAR_WIDTH + TEXT_WIDTH, TOP + len(bars) * ROW_HEIGHT + 8
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    )
    return "\n".join(
        [
            opening,
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )
