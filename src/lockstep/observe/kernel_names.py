"""Names of CUDA kernels as people read them: C++ spells out every template, in hundreds of letters."""

from __future__ import annotations

import re
from functools import lru_cache

LONGEST = 105
SCALARS = {
    "float", "double", "half", "int", "long", "short", "char", "bool", "void", "unsigned", "signed",
    "Half", "BFloat16", "complex", "__half", "__nv_bfloat16", "nv_bfloat16", "uint8_t", "int8_t", "int32_t", "int64_t",
}  # fmt: skip
PLUMBING = re.compile(r"(Metadata|Calculator|[aA]rray|TensorInfo|tuple|integral_constant|WithoutCast|WithCast)$")
"""Arguments that say how numbers are found, and not what is done with them."""
BRACKETS = {"<": ">", "(": ")", "{": "}"}


@lru_cache(maxsize=10_000)
def short_kernel_name(name: str) -> str:
    """The name without namespaces and arguments, and of its templates what is computed, or in which format.

    `void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>(int, ...)` is
    `vectorized_elementwise_kernel<CUDAFunctor_add<float>>`. Different kernels may get the same name.
    """
    short = _short(name.removeprefix("void ").replace("(anonymous namespace)::", "")) or name
    return short if len(short) <= LONGEST else short[: LONGEST - 3] + "..."


def _short(text: str) -> str:
    name, arguments = _parts(text)
    known = [_parts(argument)[0] for argument in arguments]
    told = [argument for argument, what in zip(arguments, known, strict=True) if _is_work(what)]
    told = told or [argument for argument, what in zip(arguments, known, strict=True) if what in SCALARS]
    return f"{name}<{_short(told[0])}>" if told else name


def _is_work(name: str) -> bool:
    return (
        bool(name) and not name[0].isdigit() and name not in (*SCALARS, "true", "false") and not PLUMBING.search(name)
    )


def _parts(text: str) -> tuple[str, list[str]]:
    """The last part of a qualified name, up to its list of arguments, and the arguments of its template.

    A lambda has no name: it is called by the function that it is in. A name that was cut off counts as far as it goes.
    """
    found: tuple[str, list[str]] = ("", [])
    name, arguments, begin, place = "", [""], 0, 0
    closers: list[str] = []
    while place <= len(text):
        letter = text[place] if place < len(text) else ""
        if closers:
            if letter == closers[-1]:
                closers.pop()
            elif letter in BRACKETS:
                closers.append(BRACKETS[letter])
            if closers and letter == "," and closers == [">"]:
                arguments.append("")
            elif closers and letter:
                arguments[-1] += letter
        elif letter == "<" and not name:
            name, arguments = text[begin:place], [""]
            closers.append(">")
        elif letter in ("", "(", "[") or text.startswith("::", place):
            part = name or text[begin:place]
            if part.strip() and not part.startswith("operator"):
                found = (_plain(part), [argument.strip() for argument in arguments] if name else [])
            if letter != ":":
                break
            place, begin, name = place + 1, place + 2, ""
        elif letter == "{":
            break
        place += 1
    return found if not closers else (_plain(name or text[begin:]), [argument.strip() for argument in arguments])


def _plain(name: str) -> str:
    """A type without `const`, `unsigned`, pointers and what follows a space."""
    words = [word for word in re.sub(r"[*&]", " ", name).split() if word not in ("const", "unsigned", "signed")]
    return words[0] if words else name.strip()
