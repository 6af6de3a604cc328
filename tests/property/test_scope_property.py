"""Arbitrary nesting and interleaving of scopes over threads and tasks: each sees its own, and none is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools.scope import draft_model_scope, in_draft_model

# A program for one thread or task: enter, leave (normally or by an exception), or look.
STEPS = st.lists(st.sampled_from(["enter", "enter shared", "leave", "raise", "look"]), max_size=12)
SHARED = draft_model_scope()  # the same object, entered again and again, by everybody


def run(program: list[str], start: bool) -> Iterator[None]:
    """Run a program step by step, comparing the scope with a model of it; yields between steps."""
    stacks: list[ExitStack] = []

    def check() -> None:
        assert in_draft_model() is (start or bool(stacks))

    check()
    for step in program:
        if step.startswith("enter"):
            stack = ExitStack()
            stack.enter_context(SHARED if step == "enter shared" else draft_model_scope())
            stacks.append(stack)
        elif stacks and step == "leave":
            stacks.pop().close()
        elif stacks and step == "raise":
            stack = stacks.pop()
            try:
                with stack:
                    raise KeyError
            except KeyError:
                pass
        check()
        yield
        check()
    while stacks:
        stacks.pop().close()
        check()


@given(st.lists(STEPS, min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_tasks(programs: list[list[str]]) -> None:
    async def task(program: list[str]) -> None:
        for _ in run(program, start=False):
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*map(task, programs))
        assert not in_draft_model()

    asyncio.run(main())
    assert not in_draft_model()


@given(STEPS, STEPS)
@settings(max_examples=40, deadline=None)
def test_a_task_starts_in_the_scope_it_was_made_in(outer: list[str], inner: list[str]) -> None:
    async def child(start: bool) -> None:
        for _ in run(inner, start):
            await asyncio.sleep(0)

    async def main() -> None:
        for _ in run(outer, start=False):
            await asyncio.create_task(child(in_draft_model()))

    asyncio.run(main())
    assert not in_draft_model()


@given(st.lists(STEPS, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_threads(programs: list[list[str]]) -> None:
    """Threads that take turns step by step, started from inside a scope: none of them is in it."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(programs))

    def body(program: list[str]) -> None:
        try:
            for _ in run([*program, *["look"] * (12 - len(program))], start=False):
                barrier.wait(10)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads: list[Any] = [threading.Thread(target=body, args=(program,)) for program in programs]
    with draft_model_scope():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert in_draft_model()
    assert failures == []
    assert not in_draft_model()


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_one_thread(program: list[str]) -> None:
    for _ in run(program, start=False):
        pass
    assert not in_draft_model()
