"""A figure for each of FlexFlow's networks, with the gains that the paper claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import LegendItem
from flexflow_training import Compared
from pictures import efficiency_figure

#: How many times faster than data-parallel training the paper's strategies are, at least and at most, on this
#: cluster with so many devices. Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural
#: Networks", MLSys 2019. ResNet-101 gains nothing; a bar without height would not be seen. For other networks
#: it only says "up to 3.3".
_CLAIMS = {"ResNet-101": (0.98, 1.02), "NMT": (1.7, 2.4)}
_CLAIM_OF_OTHERS = (1.0, 3.3)
_CLAIMED = ("flexflow-k80", 64)
_PERCENT = 100
#: Figures side by side; width and height of one of them, and width of an entry of its legend [pixels].
_COLUMNS, _WIDTH, _HEIGHT, _LABEL = 3, 420, 380, 140


def flexflow_plot(rows: Sequence[Compared]) -> Any:
    """Return a figure for each network: data-parallel, the expert's and the found strategy, and the ideal."""
    names = list(dict.fromkeys(one.network for one in rows))
    plots = [_of_network(name, [one for one in rows if one.network == name]) for name in names]
    lines = [plots[i : i + _COLUMNS] for i in range(0, len(plots), _COLUMNS)]
    return column(*(row(*line) for line in lines))


def _of_network(name: str, rows: Sequence[Compared]) -> Any:
    found: dict[str, dict[str, dict[int, float]]] = {}
    for one in rows:
        for kind, trained in zip(("data-parallel", "expert", "found"), one.all, strict=True):
            points = found.setdefault(kind, {}).setdefault(one.cluster.removeprefix("flexflow-").upper(), {})
            points[one.devices] = trained.samples_per_s / (one.devices * one.one)
    plot = efficiency_figure(name, found)
    plot.toolbar_location = None
    plot.xaxis.axis_label = "devices"
    plot.yaxis.axis_label = "speed per device [%]"
    plot.width, plot.height = _WIDTH, _HEIGHT
    plot.legend[0].label_width = _LABEL
    sizes = sorted({one.devices for one in rows})
    ideal = plot.line(sizes, [_PERCENT] * len(sizes), color="black", line_dash="dotted", line_width=1.5)
    plot.legend[0].items.append(LegendItem(label="ideal", renderers=[ideal]))
    for n in [one.devices for one in rows if (one.cluster, one.devices) == _CLAIMED]:
        base = _PERCENT * found["data-parallel"]["K80"][n]
        # Nothing is faster than as many devices alone.
        low, high = (min(base * ratio, _PERCENT) for ratio in _CLAIMS.get(name, _CLAIM_OF_OTHERS))
        bar = plot.segment([n], [low], [n], [high], line_width=14, line_alpha=0.25)
        plot.legend[0].items.append(LegendItem(label="the paper's gain, K80", renderers=[bar]))
    return plot
