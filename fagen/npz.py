"""Tensors in .npz files, as `fagen run --input qkv.npz --output out.npz` reads and writes them.

fp16 and fp32 arrays stand as such. NumPy's format has no bf16 and no e4m3: those stand as their bits, uint16 and uint8, beside a
text under the key `<name>_dtype` that says which ("bf16", "e4m3"). int8 stands as such. Beside 8-bit tensors there may be `q_descale`, `k_descale` and
`v_descale`, each one number or an fp32 array of the form that the schedule's scale_granularity asks for.
"""

from __future__ import annotations

import contextlib
import os
import typing
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .attention import Attention
from .descales import Descales
from .errors import InputError
from .oracle.numeric import DTYPES, Array
from .plan.kernel import DESCALES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {"bf16": np.dtype(np.uint16), "e4m3": np.dtype(np.uint8)}
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)
"""What NumPy and zipfile raise on a file that is truncated, damaged, encrypted, pickled or something else altogether."""


def read_inputs(path: str | Path, attention: Attention, cast: bool = False) -> tuple[Array, Array, Array]:
    """q, k and v from a file, as arrays of the attention's dtype (of ml_dtypes for bf16 and e4m3; beside int8 q and k, v is e4m3, or as `v_dtype` says).

    A tensor of another dtype is an InputError unless `cast`; then it is rounded to nearest, and an InputError if a finite value
    becomes infinite or NaN. int8, whose values stand for multiples of a scale, is never converted. Shapes are checked by who uses them.
    """
    arrays = read(path, ("q", "k", "v"), alone=True)
    q, k, v = (
        _as_dtype(path, name, arrays[name], attention.dtype_of(name), cast, _rule(attention, name)) for name in ("q", "k", "v")
    )
    return q, k, v


def _rule(attention: Attention, name: str) -> str:
    return "the attention takes" if attention.dtype_of(name) != attention.dtype else "the attention's dtype is"


def read_descales(path: str | Path, attention: Attention, cast: bool = False) -> Descales:
    """The descales of a file, those that are there, as NumPy arrays (0-d: one number). Shapes and values are checked by who uses them.

    InputError: of a 16-bit tensor, or an array of another type than fp32 unless `cast`.
    """
    found = read(path, (), optional=DESCALES)
    for name, x in found.items():
        if name not in attention.descales:
            what = f"a {attention.value_dtype} v" if attention.has_descales else attention.dtype
            raise InputError(str(path), f"has a {name}, but the attention takes {what}; only e4m3 and int8 tensors have a descale")
        if x.ndim:
            found[name] = _as_dtype(path, name, x, "fp32", cast, "a descale is")
    return typing.cast(Descales, found)


def read(path: str | Path, names: tuple[str, ...], optional: tuple[str, ...] = (), alone: bool = False) -> dict[str, Array]:
    """Those tensors of a file, bf16 and e4m3 decoded; of the `optional` ones those that are there. InputError naming file and key if one
    is missing, damaged or no tensor; with `alone` also for an array that is neither one of them nor a descale."""
    try:
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise InputError(str(path), "is a single .npy array; expected an .npz with the arrays " + ", ".join(names))
            with loaded:
                missing = [n for n in names if n not in loaded.files]
                if missing:
                    raise InputError(str(path), f"has no array {', '.join(missing)}; it has {', '.join(loaded.files) or 'none'}")
                known = {*names, *optional, *DESCALES, *(f"{n}_dtype" for n in (*names, *optional))}
                if alone and not known.issuperset(loaded.files):
                    other = next(n for n in loaded.files if n not in known)
                    raise InputError(
                        str(path), f"has an array {other}, which means nothing; known are {', '.join((*names, *DESCALES))}"
                    )
                return {n: _decode(path, n, loaded) for n in (*names, *(n for n in optional if n in loaded.files))}
    except IsADirectoryError:
        raise InputError(str(path), "is a folder; expected an .npz file") from None
    except FileNotFoundError:
        raise InputError(str(path), "no such file") from None
    except _UNREADABLE as e:
        raise InputError(str(path), f"cannot be read as an .npz file: {_reason(e)}") from None


def write(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write tensors (fp16, fp32, int8, bf16, e4m3) to a file that appears whole or not at all. InputError if it cannot be written."""
    content: dict[str, Any] = {}
    for name, array in arrays.items():
        dtype = _NAMES.get(array.dtype)
        if dtype is None:
            raise InputError(name, f"is {array.dtype}; an .npz of fagen holds {', '.join(DTYPES)}")
        content[name] = array.view(_BITS[dtype]) if dtype in _BITS else array
        if dtype in _BITS:
            content[f"{name}_dtype"] = np.array(dtype)
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            np.savez(file, **content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as e:
        raise InputError(str(path), f"cannot be written: {_reason(e)}") from None
    finally:
        with contextlib.suppress(OSError):  # gone after a success
            partial.unlink()


def _decode(path: str | Path, name: str, loaded: Any) -> Array:
    try:
        array: Array = loaded[name]
        label = str(loaded[f"{name}_dtype"]) if f"{name}_dtype" in loaded.files else None
    except _UNREADABLE as e:
        raise InputError(str(path), f"array {name} cannot be read: {_reason(e)}") from None
    if label is None:
        if array.dtype in _BITS.values():
            legal = next(n for n, bits in _BITS.items() if bits == array.dtype)
            raise InputError(str(path), f"{name} is {array.dtype}, and no {name}_dtype says what it stands for (such as {legal!r})")
        if array.dtype.kind != "f" and array.dtype != DTYPES["int8"]:
            raise InputError(str(path), f"{name} is {array.dtype}; expected a floating-point array, or int8")
        return array
    if label not in DTYPES:
        raise InputError(str(path), f"{name}_dtype is {label!r}; legal: {', '.join(DTYPES)}")
    stored = _BITS.get(label, DTYPES[label])
    if array.dtype != stored:
        raise InputError(str(path), f"{name} is {array.dtype}, but {name}_dtype says {label}, which is stored as {stored}")
    return array.view(DTYPES[label])


def _as_dtype(path: str | Path, name: str, array: Array, dtype: str, cast: bool, rule: str) -> Array:
    wanted = DTYPES[dtype]
    if array.dtype == wanted:
        return array
    have = _NAMES.get(array.dtype, array.dtype.name)
    if "int8" in (dtype, have):
        why = "int8 stands for multiples of a scale, so that --cast does not convert it"
        raise InputError(str(path), f"{name} is {have}, {rule} {dtype}; {why}")
    if not cast:
        raise InputError(str(path), f"{name} is {have}, {rule} {dtype}; --cast converts it")
    wide = array.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # counted below
        result = wide.astype(wanted)
    lost = int(np.count_nonzero(np.isfinite(wide) & ~np.isfinite(result.astype(np.float32))))
    if lost:
        raise InputError(
            str(path), f"{name}: {lost} finite values of {have} are beyond {dtype}, whose largest is {ml_dtypes.finfo(wanted).max}"
        )
    return result


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
