#!/usr/bin/env python3
"""Draws what `compare.py --cells grid --json FILE` measured: flashjit beside the peers, a panel for each head_dim and mask.

    plot.py FILE.json OUT.svg

FlashAttention-3 is drawn as cuDNN here times FlashAttention-3 / cuDNN as recorded for the cell (recorded.json).
"""
import json
import statistics
import sys

from compare import RECORDED, Cell

WIDTH, HEIGHT, GAP, LEFT, TOP = 250, 150, 45, 60, 60
SERIES = [("flashjit", "#d62728"), ("cuDNN", "#1f77b4"), ("FlashAttention-3", "#7f7f7f")]


def points(of, cell, recorded):
    ours, cudnn = (cell.tflops(statistics.median(of[name])) for name in ("bf16", "cudnn"))
    fa3, recorded_cudnn = recorded[cell.name]
    return ours, cudnn, cudnn * fa3 / recorded_cudnn


def panel(x, y, title, seqlens, series, top):
    place = lambda i, value: (x + i * WIDTH / (len(seqlens) - 1), y + HEIGHT - value / top * HEIGHT)
    out = [f'<text x="{x + WIDTH / 2}" y="{y - 8}" text-anchor="middle">{title}</text>',
           f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>']
    for value in range(0, top + 1, 200):
        at = place(0, value)[1]
        out.append(f'<line x1="{x}" y1="{at}" x2="{x + WIDTH}" y2="{at}" stroke="#eee"/>'
                   f'<text x="{x - 5}" y="{at + 4}" text-anchor="end">{value}</text>')
    for i, seqlen in enumerate(seqlens):
        out.append(f'<text x="{place(i, 0)[0]}" y="{y + HEIGHT + 14}" text-anchor="middle">{seqlen}</text>')
    for (name, colour), values in zip(SERIES, series):
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(i, value) for i, value in enumerate(values)))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"><title>{name}</title></polyline>')
    return "\n".join(out)


def main(measured_file, svg_file):
    with open(measured_file) as file:
        measured = json.load(file)
    with open(RECORDED) as file:
        recorded = json.load(file)["fa3_and_cudnn_tflops"]
    cells = [Cell(name, 16384) for name in measured["ms"] if name in recorded]
    panels = sorted({(cell.dim, cell.causal) for cell in cells})
    out = []
    for number, (dim, causal) in enumerate(panels):
        of = sorted((cell for cell in cells if (cell.dim, cell.causal) == (dim, causal)), key=lambda cell: cell.seqlen)
        series = list(zip(*(points(measured["ms"][cell.name], cell, recorded) for cell in of)))
        out.append(panel(LEFT + number // 2 * (WIDTH + GAP), TOP + number % 2 * (HEIGHT + GAP),
                         f"head_dim {dim}, {'causal' if causal else 'full'}", [cell.seqlen for cell in of], series, 900))
    legend = "".join(f'<text x="{LEFT + 130 * i}" y="38" fill="{colour}">{name}</text>' for i, (name, colour) in enumerate(SERIES))
    width, height = LEFT + (len(panels) + 1) // 2 * (WIDTH + GAP), TOP + 2 * (HEIGHT + GAP)
    with open(svg_file, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">\n'
                   f'<rect width="{width}" height="{height}" fill="white"/>\n'
                   f'<text x="{LEFT}" y="20" font-size="14">{measured["model"]}, {measured["target"]}: bf16 forward, TFLOP/s over seqlen, '
                   f"16,384 tokens</text>\n{legend}\n" + "\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
