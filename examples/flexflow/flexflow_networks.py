"""The six networks of FlexFlow's paper as cost graphs: shapes and weights, without values.

Sizes are those of the networks' own papers. Activations and normalisations are part of the operator before
them. A recurrent layer is a product for each of some blocks of time steps; it stands for four gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ferroflow_dask.graph import Builder, Graph

#: AlexNet's samples are so many times those of the other networks.
_ALEXNET = 4
#: Time steps of a recurrent network, and of one block of them.
_STEPS, _BLOCK = 40, 10
#: Gates of an LSTM: its products are so many times those of one of them.
_GATES = 4.0


@dataclass(frozen=True, slots=True)
class Network:
    """A network as a cost graph.

    Parameters
    ----------
    graph : Graph
    samples : int
        Of one iteration.
    times : dict of str to float
        As for `TrainingProblem`.
    without : dict of str to tuple of str
        Likewise.
    depth : dict of str to int
        Layer of recurrent operators and of what belongs to them.
    """

    graph: Graph
    samples: int
    times: dict[str, float] = field(default_factory=dict)
    without: dict[str, tuple[str, ...]] = field(default_factory=dict)
    depth: dict[str, int] = field(default_factory=dict)


def _dim(b: Builder, value: str, axis: int) -> int:
    return int((b.spec(value).shape or ())[axis] or 0)


def _zeros(b: Builder, *shape: int) -> str:
    """Add a weight, whose values take no memory."""
    added: str = b.constant(np.broadcast_to(np.float32(0), shape))
    return added


class _Layers:
    """Layers of a CNN."""

    def __init__(self, name: str, samples: int, size: int) -> None:
        self.b = Builder(name)
        self.x = self.b.input("images", np.float32, (samples, 3, size, size))

    def conv(self, x: str, n_out: int, kernel: int | tuple[int, int], stride: int = 1, pad: int = -1) -> str:
        """Add a convolution; without `pad` the size of the image stays."""
        kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
        ph, pw = (kh // 2, kw // 2) if pad < 0 else (pad, pad)
        n_in = _dim(self.b, x, 1)
        added: str = self.b.op(
            "Conv", x, _zeros(self.b, n_out, n_in, kh, kw), strides=[stride, stride], pads=[ph, pw, ph, pw]
        )
        return added

    def pool(self, x: str, kernel: int, stride: int, pad: int = 0, kind: str = "MaxPool") -> str:
        """Add a pooling layer."""
        added: str = self.b.op(kind, x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)
        return added

    def dense(self, x: str, n_out: int) -> str:
        """Add a fully connected layer."""
        added: str = self.b.op("Gemm", x, _zeros(self.b, _dim(self.b, x, 1), n_out))
        return added

    def end(self, x: str, n_out: int, samples: int) -> Network:
        """Add the classifier."""
        flat = self.b.op("Flatten", self.b.op("GlobalAveragePool", x))
        self.b.output(y=self.dense(flat, n_out))
        return Network(self.b.to_graph(), samples)


def alexnet(samples: int) -> Network:
    """Krizhevsky, Sutskever and Hinton, 2012, as one column."""
    samples *= _ALEXNET
    net = _Layers("AlexNet", samples, 229)
    x = net.pool(net.conv(net.x, 64, 11, 4, 2), 3, 2)
    x = net.pool(net.conv(x, 192, 5), 3, 2)
    x = net.conv(net.conv(net.conv(x, 384, 3), 256, 3), 256, 3)
    x = net.b.op("Flatten", net.pool(x, 3, 2))
    for n in (4096, 4096, 1000):
        x = net.dense(x, n)
    net.b.output(y=x)
    return Network(net.b.to_graph(), samples)


def resnet(samples: int) -> Network:
    """He, Zhang, Ren and Sun, 2016: ResNet-101."""
    net = _Layers("ResNet-101", samples, 224)
    x = net.pool(net.conv(net.x, 64, 7, 2), 3, 2, 1)
    for n, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 23, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first if block == 0 else 1
            shortcut = net.conv(x, 4 * n, 1, stride) if block == 0 else x
            inner = net.conv(net.conv(net.conv(x, n, 1), n, 3, stride), 4 * n, 1)
            x = net.b.op("Add", inner, shortcut)
    return net.end(x, 1000, samples)


def inception(samples: int) -> Network:
    """Szegedy et al., 2016: Inception-v3, without the second classifier."""
    net = _Layers("Inception-v3", samples, 299)

    def joined(*branches: str) -> str:
        added: str = net.b.op("Concat", *branches, axis=1)
        return added

    def branch(x: str, *convs: tuple[int, int | tuple[int, int]]) -> str:
        for n, kernel in convs:
            x = net.conv(x, n, kernel)
        return x

    def shrunk(x: str, *convs: tuple[int, int | tuple[int, int]]) -> str:
        *rest, (last, _) = convs
        return net.conv(branch(x, *rest), last, 3, 2, 0)

    def averaged(x: str, n: int) -> str:
        return net.conv(net.pool(x, 3, 1, 1, "AveragePool"), n, 1)

    x = net.conv(net.conv(net.conv(net.x, 32, 3, 2, 0), 32, 3, 1, 0), 64, 3)
    x = net.pool(net.conv(net.conv(net.pool(x, 3, 2), 80, 1), 192, 3, 1, 0), 3, 2)
    for n in (32, 64, 64):
        x = joined(
            branch(x, (64, 1)),
            branch(x, (48, 1), (64, 5)),
            branch(x, (64, 1), (96, 3), (96, 3)),
            averaged(x, n),
        )
    x = joined(shrunk(x, (384, 3)), shrunk(x, (64, 1), (96, 3), (96, 3)), net.pool(x, 3, 2))
    for n in (128, 160, 160, 192):
        row, column = (1, 7), (7, 1)
        long = branch(x, (n, 1), (n, column), (n, row), (n, column), (192, row))
        x = joined(branch(x, (192, 1)), branch(x, (n, 1), (n, row), (192, column)), long, averaged(x, 192))
    x = joined(
        shrunk(x, (192, 1), (320, 3)),
        shrunk(x, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)),
        net.pool(x, 3, 2),
    )
    for _ in range(2):
        one, two = branch(x, (384, 1)), branch(x, (448, 1), (384, 3))
        x = joined(
            branch(x, (320, 1)),
            *(branch(part, (384, kernel)) for part in (one, two) for kernel in ((1, 3), (3, 1))),
            averaged(x, 192),
        )
    return net.end(x, 1000, samples)


class _Steps:
    """Layers of a recurrent network, in blocks of time steps."""

    def __init__(self, name: str, samples: int, width: int) -> None:
        self.b, self.samples, self.width = Builder(name), samples, width
        self.times: dict[str, float] = {}
        self.without: dict[str, tuple[str, ...]] = {}
        self.depth: dict[str, int] = {}

    def op(self, depth: int, op_type: str, *inputs: str, times: float = 1.0, **attributes: Any) -> str:
        """Add an operator of a layer."""
        name = f"{op_type} {len(self.depth)}"
        added: str = self.b.op(op_type, *inputs, name=name, **attributes)
        self.depth[name], self.times[name] = depth, times
        return added

    def words(self, name: str, n_words: int, depth: int = 0) -> list[str]:
        """Add an input and its embedding, block by block."""
        table = _zeros(self.b, n_words, self.width)
        shape = (self.samples, _BLOCK)
        indices = [self.b.input(f"{name} {i}", np.int64, shape) for i in range(_STEPS // _BLOCK)]
        return [self.op(depth, "Gather", table, one, axis=0) for one in indices]

    def recurrent(self, blocks: list[str], depth: int, before: str | None = None) -> list[str]:
        """Add a recurrent layer."""
        weight, made = _zeros(self.b, 2 * self.width, self.width), []
        state = before or self.b.input(f"state {depth}", np.float32, (self.samples, _BLOCK, self.width))
        for x in blocks:
            both = self.op(depth, "Concat", x, state, times=0.0, axis=-1)
            state = self.op(depth, "MatMul", both, weight, times=_GATES)
            # The steps of a block come one after another.
            names = list(self.depth)[-2:]
            self.without.update(dict.fromkeys(names, ("attribute1",)))
            made.append(state)
        return made

    def dense(self, blocks: list[str], n_out: int, depth: int) -> list[str]:
        """Add a fully connected layer. Its Softmax needs two numbers of each part, which count as nothing."""
        weight = _zeros(self.b, _dim(self.b, blocks[0], -1), n_out)
        return [self.op(depth, "MatMul", x, weight) for x in blocks]

    def end(self, outputs: list[str]) -> Network:
        """Return the network."""
        self.b.output(**{f"y{i}": value for i, value in enumerate(outputs)})
        return Network(self.b.to_graph(), self.samples, self.times, self.without, self.depth)


def rnn_classifier(samples: int) -> Network:
    """Four recurrent layers and a Softmax over the last state."""
    net = _Steps("RNNTC", samples, 1024)
    blocks = net.words("words", 20_000)
    for depth in range(4):
        blocks = net.recurrent(blocks, depth)
    return net.end(net.dense(blocks[-1:], 2, 3))


def language_model(samples: int) -> Network:
    """Two recurrent layers and a Softmax over all words."""
    net = _Steps("RNNLM", samples, 2048)
    blocks = net.words("words", 10_000)
    for depth in range(2):
        blocks = net.recurrent(blocks, depth)
    return net.end(net.dense(blocks, 10_000, 2))


def nmt(samples: int) -> Network:
    """Two recurrent layers that read, two that write, attention between them, a Softmax over all words."""
    net = _Steps("NMT", samples, 1024)
    source = net.words("source", 32_000)
    for depth in range(2):
        source = net.recurrent(source, depth)
    memory = net.op(1, "Concat", *source, times=0.0, axis=1)
    turned = net.op(1, "Transpose", memory, times=0.0, perm=[0, 2, 1])
    target = net.words("target", 32_000, 2)
    for depth in (2, 3):
        target = net.recurrent(target, depth)
    mixed = []
    for x in target:
        scores = net.op(3, "Softmax", net.op(3, "MatMul", x, turned))
        mixed.append(net.op(3, "Concat", x, net.op(3, "MatMul", scores, memory), times=0.0, axis=-1))
    return net.end(net.dense(mixed, 32_000, 3))


#: By the names of FlexFlow's paper. They take the number of samples; AlexNet has four times as many.
NETWORKS: Mapping[str, Callable[[int], Network]] = {
    "AlexNet": alexnet,
    "Inception-v3": inception,
    "ResNet-101": resnet,
    "RNNTC": rnn_classifier,
    "RNNLM": language_model,
    "NMT": nmt,
}
