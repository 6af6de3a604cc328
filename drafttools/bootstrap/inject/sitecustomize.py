"""Activate drafttools in this process, then run the sitecustomize that would have run without us.

Python imports only the first `sitecustomize` on its path. This file must load on any Python and must never be the
reason that a process fails: what goes wrong in drafttools is said in one line, what goes wrong in the next
sitecustomize is reported by Python as ever.
"""

import os
import sys


def _activate():
    if sys.version_info < (3, 11) or sys.implementation.name != "cpython":
        return
    if os.environ.get("DRAFTTOOLS", "").strip().lower() == "off":
        return
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    os.environ.setdefault("DRAFTTOOLS_WAY_IN", "inject")
    os.environ["DRAFTTOOLS_HOOK"] = "sitecustomize:%d" % os.getpid()
    added = root not in sys.path
    if added:
        sys.path.append(root)
    try:
        import drafttools  # noqa: F401
    except Exception as error:
        sys.stderr.write("drafttools: not active in this process: %s: %s\n" % (type(error).__name__, error))
    finally:
        if added and root in sys.path:
            sys.path.remove(root)


def _run_next():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.abspath(p or os.curdir) for p in sys.path]
    # Only what comes after us: whoever stands before us has already run, and may have us as its own next.
    start = places.index(here) + 1 if here in places else 0
    later = [p for p, place in zip(sys.path[start:], places[start:]) if place != here]
    spec = PathFinder.find_spec("sitecustomize", later)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_activate()
_run_next()
