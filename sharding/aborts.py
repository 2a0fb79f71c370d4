"""Keeps JAX from aborting the process when its coordination service has lost another one.

Its client calls back into Python with a status that has no Python type: the call ends in
std::bad_cast and std::terminate, and without a callback it is LOG(FATAL). Both are SIGABRT with a
stack trace. No other part of jaxlib lets a std::bad_cast escape, so this handler of std::terminate
knows what has happened. A JAX that can convert the status calls the callback itself.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

from jax._src import distributed  # the client's callback has no public name

_kept = []  # what C++ calls must not be collected


@contextlib.contextmanager
def replaced_by(ended: Callable[[], None]) -> Iterator[None]:
    """Has clients that are made inside it call `ended`, which must not return, and not abort."""
    made = distributed._jax.get_distributed_runtime_client
    distributed._jax.get_distributed_runtime_client = functools.partial(
        made, missed_heartbeat_callback=lambda *_: ended()
    )
    with contextlib.suppress(OSError):  # another C++ library than GNU's: its abort stays
        _handle_terminate(ended)
    try:
        yield
    finally:
        distributed._jax.get_distributed_runtime_client = made


def _handle_terminate(ended: Callable[[], None]) -> None:
    library = ctypes.CDLL("libstdc++.so.6")
    type_of_current = library.__cxa_current_exception_type
    get, replace = library._ZSt13get_terminatev, library._ZSt13set_terminatePFvvE
    type_of_current.restype = get.restype = ctypes.c_void_p
    replace.argtypes = [ctypes.c_void_p]
    former = ctypes.CFUNCTYPE(None)(get())

    @ctypes.CFUNCTYPE(None)
    def terminate():
        # A std::type_info is its table of functions and the mangled name of the type.
        info = type_of_current()
        name = ctypes.cast(info, ctypes.POINTER(ctypes.c_char_p))[1] if info else b""
        if name == b"St8bad_cast":
            ended()
        former()

    _kept.append(terminate)
    replace(terminate)
