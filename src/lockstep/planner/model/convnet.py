"""ResNets by their architecture: every convolution as the product that it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.planner.model.parts import Matmul, Model, ModelPart

CLASSES = 1000
IMAGE = 224
WIDTHS = (64, 128, 256, 512)
RESNETS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}
"""Blocks of the four stages (He et al. 2015, table 1), and whether they are bottlenecks; as in torchvision."""
WIDER = 4
"""A bottleneck hands on so many times the channels that it works with."""


@dataclass(frozen=True)
class Conv:
    """A convolution without bias, and the batch norm after it."""

    channels: int
    filters: int
    kernel: int
    pixels: int
    """Of its output, both sides together."""

    @property
    def parameters(self) -> int:
        """Of the convolution, and scale and shift of the norm."""
        return self.channels * self.filters * self.kernel**2 + 2 * self.filters

    @property
    def matmul(self) -> Matmul:
        """A row a pixel."""
        return Matmul(self.pixels, self.channels * self.kernel**2, self.filters)

    @property
    def elements(self) -> int:
        """Of its output."""
        return self.pixels * self.filters


def resnet(name: str) -> Model:
    """The model for images of 224 x 224 in 1000 classes."""
    counts, bottleneck = RESNETS[name]
    stem = Conv(3, WIDTHS[0], 7, (IMAGE // 2) ** 2)
    pooled = stem.elements // 4
    parts = [
        replace(
            _part("stem", [stem], pooled),
            # The pool keeps what it read, which the ReLU kept already, and 8 bytes an index.
            kept_bytes=8.0 * pooled,
            traffic=5.0 * stem.elements + stem.elements + pooled,
            kernels=4,
        )
    ]
    channels, side = WIDTHS[0], IMAGE // 4
    for stage, (count, width) in enumerate(zip(counts, WIDTHS, strict=True)):
        out = width * WIDER if bottleneck else width
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            part = _block(f"stage {stage + 1}", channels, width, out, side, stride, bottleneck)
            if replace(parts[-1], count=1) == part:
                parts[-1] = replace(parts[-1], count=parts[-1].count + 1)
            else:
                parts.append(part)
            channels, side = out, side // stride
    parts.append(
        ModelPart(
            name="head",
            count=1,
            parameters=(channels + 1) * CLASSES,
            cut_parameters=0,
            matmuls=(Matmul(1, channels, CLASSES),),
            kept=float(channels + CLASSES),
            traffic=float(channels * (side**2 + 1) + 4 * CLASSES),
            kernels=4,
        )
    )
    return Model(name, tuple(parts), sequence=1)


def _block(name: str, channels: int, width: int, out: int, side: int, stride: int, bottleneck: bool) -> ModelPart:
    """Two convolutions of 3 x 3, or three of 1 x 1, 3 x 3 and 1 x 1, beside a way past them."""
    before, after = side**2, (side // stride) ** 2
    if bottleneck:
        convs = [Conv(channels, width, 1, before), Conv(width, width, 3, after), Conv(width, out, 1, after)]
    else:
        convs = [Conv(channels, width, 3, after), Conv(width, out, 3, after)]
    reshapes = stride > 1 or channels != out
    past = [Conv(channels, out, 1, after)] if reshapes else []
    part = _part(name + (", first" if reshapes else ""), convs + past, convs[-1].elements)
    handed_on = convs[-1].elements
    return replace(
        part,
        # The way past ends in a sum instead of a ReLU of its own.
        kept=part.kept - sum(conv.elements for conv in past),
        traffic=part.traffic + 3.0 * handed_on - 2.0 * sum(conv.elements for conv in past),
        kernels=part.kernels + 1 - len(past),
    )


def _part(name: str, convs: list[Conv], border: int) -> ModelPart:
    """Each convolution with its norm and a ReLU: what the norm read is kept, and what the ReLU wrote."""
    elements = sum(conv.elements for conv in convs)
    return ModelPart(
        name=name,
        count=1,
        parameters=sum(conv.parameters for conv in convs),
        cut_parameters=0,
        matmuls=tuple(conv.matmul for conv in convs),
        kept=2.0 * elements,
        # The norm reads twice and writes, the ReLU reads and writes.
        traffic=5.0 * elements,
        kernels=3 * len(convs),
        border=float(border),
    )
