#!/usr/bin/env python3
"""Plots the speeds that `compare.py --cells grid --json FILE` measured, or those of `--cells backward_grid`: flashjit beside the peers, a panel for each
head_dim and mask.

    plot.py FILE.json OUT.svg

Lines show the medians of the rounds: dashed lines at rest, solid lines sustained.
"""
import json
import statistics
import sys

from cells import GPU_CELLS, Cell
from compare import STATES

WIDTH, HEIGHT, GAP, LEFT, TOP = 250, 150, 45, 60, 60
SIDES = {"flashjit": ("flashjit", "#d62728"), "cudnn": ("cuDNN", "#1f77b4"), "fa3": ("FlashAttention-3", "#7f7f7f"),
         "fa2": ("FlashAttention-2", "#2ca02c")}
LINES = {"rest": ("broken", "4 2"), "sustained": ("whole", "none")}


def panel(x, y, title, seqlens, lines, top):
    place = lambda seqlen, value: (x + seqlens.index(seqlen) * WIDTH / max(1, len(seqlens) - 1), y + HEIGHT - value / top * HEIGHT)
    out = [f'<text x="{x + WIDTH / 2}" y="{y - 8}" text-anchor="middle">{title}</text>',
           f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>']
    for value in range(0, top + 1, 200):
        at = place(seqlens[0], value)[1]
        out.append(f'<line x1="{x}" y1="{at}" x2="{x + WIDTH}" y2="{at}" stroke="#eee"/>'
                   f'<text x="{x - 5}" y="{at + 4}" text-anchor="end">{value}</text>')
    for seqlen in seqlens:
        out.append(f'<text x="{place(seqlen, 0)[0]}" y="{y + HEIGHT + 14}" text-anchor="middle">{seqlen}</text>')
    for (side, state), points in lines.items():
        name, colour = SIDES[side]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(*point) for point in sorted(points)))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{LINES[state][1]}">'
                   f"<title>{name}, {STATES[state].lower()}</title></polyline>")
    return "\n".join(out)


def main(measured_file, svg_file):
    with open(measured_file) as file:
        measured = json.load(file)
    backward = any(visit["cell"].startswith("backward:") for visit in measured["visits"])
    grid = GPU_CELLS["backward_grid" if backward else "grid"]
    times = {}  # (cell, side, state): milliseconds, one of each round
    for visit in measured["visits"]:
        for side, ms in visit["ms"].items():
            if visit["cell"] in grid and side in SIDES and ms:
                times.setdefault((visit["cell"], side, visit["state"]), []).append(ms)
    panels = {}  # (head_dim, causal): {(side, state): points}
    for (name, side, state), of in times.items():
        cell = Cell(name, measured["tokens"])
        lines = panels.setdefault((cell.dim, cell.causal), {})
        lines.setdefault((side, state), []).append((cell.seqlen, cell.tflops(statistics.median(of))))
    out = []
    for number, ((dim, causal), lines) in enumerate(sorted(panels.items())):
        seqlens = sorted({seqlen for points in lines.values() for seqlen, _ in points})
        out.append(panel(LEFT + number // 2 * (WIDTH + GAP), TOP + number % 2 * (HEIGHT + GAP),
                         f"head_dim {dim}, {'causal' if causal else 'full'}", seqlens, lines, 700 if backward else 900))
    drawn = [SIDES[side] for side in SIDES if any(side == drawn for _, drawn, _ in times)]
    states = [state for state in STATES if any(state == drawn for _, _, drawn in times)]
    legend = "".join(f'<text x="{LEFT + 130 * i}" y="38" fill="{colour}">{name}</text>' for i, (name, colour) in enumerate(drawn))
    width, height = LEFT + (len(panels) + 1) // 2 * (WIDTH + GAP), TOP + 2 * (HEIGHT + GAP)
    with open(svg_file, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">\n'
                   f'<rect width="{width}" height="{height}" fill="white"/>\n'
                   f'<text x="{LEFT}" y="20" font-size="14">{measured["model"]}, {measured["target"]}: bf16 {"backward" if backward else "forward"}, TFLOP/s over seqlen, '
                   f'{measured["tokens"]:,} tokens; {", ".join(f"{STATES[s].lower()} {LINES[s][0]}" for s in states)}</text>\n{legend}\n'
                   + "\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
