"""What torch functions do with tensors that are cut over ranks: one rule each, by name.

A rule is called with the function and its arguments, where a `Cut` is its own part. It returns the result, or
NotImplemented where the operation needs whole tensors; then those are gathered. Shapes and dims in the arguments are
those of the whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.parallel.tensor.cut import along_of, cuts_in, mark, plain, whole_shape, without_cuts
from lockstep.parallel.tensor.rules import losses, numbers, products, shapes
from lockstep.parallel.tensor.rules.operands import Rule, cannot


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a torch function that was given a Cut."""
    name = func.__name__
    if name == "__get__":
        return _attribute(func, args[0])
    if name in FACTS:
        return func(*args, **kwargs)
    if "axis" in kwargs:
        kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
    result: Any = NotImplemented
    if (rule := RULES.get(name)) is not None and kwargs.get("out") is None:
        result = rule(func, args, kwargs)
    if result is not NotImplemented:
        return result
    for cut in cuts_in((args, kwargs)):
        cannot(along_of(cut), f"{name.strip('_')} needs the whole of it")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        raise UserError(
            f"{name.strip('_')} changes a tensor in place that is cut over ranks",
            "write y = x + 1 rather than x += 1, or leave the tensor whole (tensor.roles)",
        )
    return func(*without_cuts(args), **without_cuts(kwargs))


def _attribute(func: Any, value: torch.Tensor) -> Any:
    if func == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
        return torch.Size(whole_shape(value))
    if func == torch.Tensor.T.__get__:  # type: ignore[attr-defined]
        return shapes.permute_whole(value, range(value.dim())[::-1])
    if func == torch.Tensor.mT.__get__:  # type: ignore[attr-defined]
        return shapes.swap_dims(torch.transpose, (value, -2, -1), {})
    if func == torch.Tensor.H.__get__ or func == torch.Tensor.mH.__get__:  # type: ignore[attr-defined]
        return numbers.pointwise(torch.conj, (shapes.swap_dims(torch.transpose, (value, -2, -1), {}),), {})
    if func == torch.Tensor.real.__get__ or func == torch.Tensor.imag.__get__:  # type: ignore[attr-defined]
        return mark(func(plain(value)), along_of(value))
    if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
        return mark(value.detach(), along_of(value))
    return func(value)


def size(func: Any, args: Any, kwargs: Any) -> Any:
    """`x.size()` and `x.size(dim)`."""
    shape = torch.Size(whole_shape(args[0]))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def numel(func: Any, args: Any, kwargs: Any) -> Any:
    """How many numbers the whole has."""
    return math.prod(whole_shape(args[0]))


def length(func: Any, args: Any, kwargs: Any) -> Any:
    """`len(x)`."""
    return whole_shape(args[0])[0]


# fmt: off
FACTS = frozenset([
    "dim", "ndimension", "is_floating_point", "is_complex", "is_signed", "element_size", "get_device",
    "is_contiguous", "stride", "storage_offset", "data_ptr", "untyped_storage", "register_hook", "retain_grad",
    "requires_grad_", "is_inference", "is_conj", "is_neg", "has_names", "_is_view", "_is_zerotensor", "__hash__",
    "__repr__", "__format__",
])
"""What is the same of a part and of the whole, or concerns the part alone."""

POINTWISE = [
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod",
    "pow", "square", "sqrt", "rsqrt", "reciprocal", "neg", "negative", "abs", "absolute", "sign", "exp", "exp2",
    "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan",
    "atan2", "erf", "erfc", "sigmoid", "logit", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu",
    "leaky_relu", "softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "threshold",
    "tanhshrink", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin",
    "masked_fill", "lerp", "addcmul", "addcdiv", "nan_to_num", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le",
    "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_not", "bitwise_xor", "floor", "ceil", "round", "trunc", "frac", "conj", "real", "imag", "angle",
    "polar", "complex", "float", "double", "half", "bfloat16", "int", "long", "bool", "contiguous", "clone",
    "detach", "rsub", "xlogy", "copysign", "hypot", "ones_like", "zeros_like", "full_like", "empty_like", "positive",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__div__",
    "__rdiv__", "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__or__", "__xor__",
    "__rand__", "__ror__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__rmod__",
    "__floordiv__", "__rfloordiv__",
    *numbers.IN_PLACE,
]
ALONG_DIM = [
    "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "normalize", "flip", "roll", "sort", "argsort", "topk",
]
REDUCTIONS = [
    "sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "any", "all", "prod", "logsumexp", "var", "std",
    "norm", "vector_norm", "count_nonzero",
]
LOSSES = [
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
]
OWN_NAMES = {
    numbers: ("dropout", "one_hot", "where", "prelu", "glu"),
    shapes: (
        "flatten", "unflatten", "permute", "unsqueeze", "squeeze", "repeat", "repeat_interleave", "split", "chunk",
        "unbind", "select", "narrow", "stack", "pad",
    ),
    products: ("linear", "einsum"),
    losses: ("embedding", "cross_entropy"),
}
"""Functions whose rules have their names."""
# fmt: on

RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, numbers.pointwise),
    **dict.fromkeys(ALONG_DIM, numbers.along_dim),
    **dict.fromkeys(REDUCTIONS, numbers.reduction),
    **dict.fromkeys(LOSSES, numbers.elementwise_loss),
    **dict.fromkeys(("to", "type", "type_as"), numbers.like_first),
    **dict.fromkeys(("layer_norm", "rms_norm"), numbers.norm_of_last),
    **dict.fromkeys(("rand_like", "randn_like"), numbers.random_like),
    **dict.fromkeys(("view", "reshape"), shapes.reshape),
    **dict.fromkeys(("view_as", "reshape_as"), shapes.reshape_as),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), shapes.swap_dims),
    **dict.fromkeys(("movedim", "moveaxis"), shapes.movedim),
    **dict.fromkeys(("expand", "expand_as"), shapes.expand),
    **dict.fromkeys(("cat", "concat", "concatenate"), shapes.cat),
    **dict.fromkeys(("view_as_complex", "view_as_real"), shapes.complex_pairs),
    **dict.fromkeys(("matmul", "bmm", "mm", "__matmul__", "__rmatmul__"), products.matmul),
    **dict.fromkeys(("addmm", "baddbmm"), products.add_product),
    **dict.fromkeys(("numel", "nelement"), numel),
    "size": size,
    "__len__": length,
    "__getitem__": shapes.getitem,
    "scaled_dot_product_attention": products.attention,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"), numbers.new_tensor),
    **{name: getattr(module, name) for module, names in OWN_NAMES.items() for name in names},
}
