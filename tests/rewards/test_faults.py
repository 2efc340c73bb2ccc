"""Functions that do what they should not: what becomes of their group, in which words, and what of the next one."""

from __future__ import annotations

import math
import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import RewardError
from rollplex.protocol.reward import GroupRewarded, RewardFailed, RewardProblem
from support.reward_child import TEXTS, Child, numbers, processes_with, wait_until

Functions = Callable[[str], Path]
LOST = "no answer, the process that ran it was lost"


GOOD = {
    "a list": "[1, 0.5, None]",
    "a tuple": "(1, 0.5, None)",
    "numpy's numbers": "[np.float64(1), np.float32(0.5), None]",
    "an array": "np.array([1.0, 0.5, 0.25])",
    "something with tolist": "Like([1, 0.5, 0.25])",
    "scalars with item": "[One(1), One(0.5), One(0.25)]",
    "fractions": "[fractions.Fraction(1), fractions.Fraction(1, 2), 0]",
    "the largest": "[1e18, -1e18, 5e-324]",
}


@pytest.mark.parametrize("what", GOOD)
def test_what_is_a_number_is_taken_as_it_is(what: str, child: Child, functions: Functions) -> None:
    path = functions(
        "import fractions\n"
        "import numpy as np\n"
        "class Like(list):\n    def tolist(self): return list(self)\n"
        "class One(tuple):\n    shape = ()\n    __new__ = lambda cls, x: tuple.__new__(cls, (x,))\n"
        "    def item(self): return self[0]\n"
        f"def f(prompts): return {GOOD[what]}\n"
    )
    child.open((f"{path}:f", 1.0))
    first, second, third = numbers(child.rewarded().rewards)
    assert (first, second) == ((1e18, -1e18) if what == "the largest" else (1.0, 0.5))
    assert math.isnan(third) or third in {0.25, 0.0, 5e-324}


BAD = [
    ("return [1.0]", "wrong_count", "1 reward for 3 completions"),
    ("return []", "wrong_count", "0 rewards for 3 completions"),
    ("return [float('nan'), 0, 0]", "not_finite", "sample 0: nan, not between -1e18 and 1e18"),
    ("return [0, float('inf'), 0]", "not_finite", "sample 1: inf, not between -1e18 and 1e18"),
    ("return [0, 0, 1e30]", "not_finite", "sample 2: 1e+30, not between -1e18 and 1e18"),
    ("return [0, 10**400, 0]", "not_finite", "sample 1: inf, not between -1e18 and 1e18"),
    ("return ['1', 0, 0]", "wrong_type", "sample 0: str '1'"),
    ("return [0, True, 0]", "wrong_type", "sample 1: bool True; float(…) makes 1.0 or 0.0 of it, if that is meant"),
    ("return [0, [1], 0]", "wrong_type", "sample 1: list [1]"),
    ("return [0, {'score': 1}, 0]", "wrong_type", "sample 1: dict {'score': 1}"),
    ("return None", "wrong_type", "NoneType None instead of a list of 3 numbers"),
    ("return 1.0", "wrong_type", "float 1.0 instead of a list of 3 numbers"),
    ("return 'abc'", "wrong_type", "str 'abc' instead of a list of 3 numbers"),
    ("return {0: 1, 1: 1, 2: 1}", "wrong_type", "dict {0: 1, 1: 1, 2: 1} instead of a list of 3 numbers"),
    ("raise KeyError('no such key')", "raised", "KeyError: 'no such key'"),
    ("return prompts[9]", "raised", "IndexError: list index out of range"),
    ("return bad(prompts)", "raised", "RecursionError: maximum recursion depth exceeded"),
    ("sys.exit(0)", "raised", "SystemExit: 0"),
    ("raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
    ("os._exit(0)", "raised", f"{LOST}: ended with exit code 0"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "raised", f"{LOST}: ended by SIGSEGV"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "raised", f"{LOST}: ended by SIGKILL, perhaps for want of memory"),
    ("os.closerange(0, 65_536); return [0] * 3", "raised", LOST),
    ("os.write(int(sys.argv[1]), b'garbage' * 9); time.sleep(60)", "raised", LOST),
]


@pytest.mark.parametrize(("body", "problem", "detail"), BAD, ids=[body for body, _, _ in BAD])
def test_a_function_that_fails_is_reported_by_name_and_row_and_the_next_group_is_scored(
    body: str, problem: str, detail: str, child: Child, functions: Functions
) -> None:
    path = functions(
        "import os, signal, sys, time\n"
        "def good(prompts): return [1.0] * len(prompts)\n"
        "def guarded(prompts, answer): return bad(prompts) if answer[0] == '7' else good(prompts)\n"
        f"def bad(prompts):\n    {body}\n"
    )
    child.open((f"{path}:good", 1.0), (f"{path}:guarded", 1.0))
    failure = child.failed()
    assert (failure.function, failure.problem) == ("guarded", problem)
    assert (failure.cause, failure.step, failure.group, failure.row) == (2, 3, 5, 0)
    sentence, _, trace = failure.detail.partition("\n")
    assert sentence.startswith(detail) if detail == LOST else sentence == detail
    if problem == "raised" and LOST not in detail:
        assert f'File "{path}", line 5, in bad' in trace
        assert "rewards/runner.py" not in trace
    assert failure.place.endswith(".jsonl:1 (row 0)")
    assert numbers(child.rewarded(1).rewards) == [2.0] * 3


def test_a_column_that_a_row_lacks_is_reported(child: Child, functions: Functions) -> None:
    child.open((f"{functions('def f(prompts, answer): return [1] * len(answer)')}:f", 1.0))
    failure = child.failed(2)
    assert failure.problem is RewardProblem.RAISED
    assert failure.detail.startswith("The function asks for what the row lacks: arguments ['answer'] (needed: some of")
    child.rewarded(0)


HANGS = {
    "sleeping": "time.sleep(600)",
    "computing": "while True: pass",
    "holding the interpreter": "re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "deaf to signals": "[signal.signal(s, signal.SIG_IGN) for s in (10, 14, 15)], time.sleep(600)",
    "in a lock": "threading.Lock().__enter__(), (lock := threading.Lock()).acquire(), lock.acquire()",
    "waiting for a child": "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', __file__])",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_function_that_hangs_is_cut_off_and_named(how: str, child: Child, functions: Functions) -> None:
    path = functions(
        "import os, re, signal, subprocess, sys, threading, time\n"
        "def good(prompts): return [1.0] * len(prompts)\n"
        "def slow(prompts):\n"
        f"    {HANGS[how]}\n"
    )
    child.open((f"{path}:good", 1.0), (f"{path}:slow", 1.0), limit_s=1.5)
    failure = child.failed()
    assert (failure.function, failure.problem, failure.row) == ("slow", RewardProblem.TIMED_OUT, 0)
    assert "no answer after 1.5 s" in failure.detail
    if how in {"sleeping", "computing", "holding the interpreter"}:
        assert f'File "{path}", line 4 in slow' in failure.detail
    assert processes_with("rollplex.rewards.runner", os.getpid()) == []
    wait_until(lambda: processes_with(str(path)) == [])


def test_the_limit_is_for_all_functions_together(child: Child, functions: Functions) -> None:
    path = functions("import time\ndef a(prompts):\n    time.sleep(1.0)\n    return [0] * len(prompts)\nb = a\n")
    child.open((f"{path}:a", 1.0), (f"{path}:b", 1.0), limit_s=1.7)
    failure = child.failed()
    assert (failure.function, failure.problem) == ("b", RewardProblem.TIMED_OUT)


def test_a_function_that_eats_memory_is_stopped_by_the_limit(child: Child, functions: Functions) -> None:
    path = functions("def f(prompts): return [len(bytearray(2**33))] * 3\ndef g(prompts): return [1] * 3\n")
    child.open((f"{path}:f", 1.0), memory=2**30)
    failure = child.failed()
    assert failure.problem is RewardProblem.RAISED
    assert "MemoryError" in failure.detail


def test_a_function_that_eats_memory_bit_by_bit_is_stopped_too(child: Child, functions: Functions) -> None:
    path = functions(
        "def f(prompts):\n    kept = []\n    while True: kept.append(bytearray(2**22))\n"
        "def g(prompts): return [1] * 3\n"
    )
    child.open((f"{path}:f", 1.0), memory=2**30)
    assert child.failed().detail.splitlines()[0] == "MemoryError"


def test_while_one_function_hangs_the_other_groups_are_scored(child: Child, functions: Functions) -> None:
    path = functions(
        "import time\n"
        "def f(prompts, answer):\n"
        "    if answer[0] == '7': time.sleep(600)\n"
        "    return [1.0] * len(prompts)\n"
    )
    child.open((f"{path}:f", 1.0), limit_s=3.0, workers=2)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for row, group in ((0, 0), (1, 1), (1, 2), (0, 3), (1, 4)):
        child.service.handle(child.group(row, group=group), answers.put)
    found = {answer.group: answer for answer in (answers.get(timeout=60) for _ in range(5))}
    assert [type(found[group]) for group in range(5)] == [
        RewardFailed,
        GroupRewarded,
        GroupRewarded,
        RewardFailed,
        GroupRewarded,
    ]
    assert {found[0].problem, found[3].problem} == {RewardProblem.TIMED_OUT}


def test_after_a_time_out_the_next_group_is_scored_by_a_new_process(child: Child, functions: Functions) -> None:
    path = functions(
        "import time\n"
        "calls = []\n"
        "def f(prompts, answer):\n"
        "    calls.append(1)\n"
        "    if answer[0] == '7': time.sleep(600)\n"
        "    return [float(len(calls))] * len(prompts)\n"
    )
    child.open((f"{path}:f", 1.0), limit_s=0.5)
    assert numbers(child.rewarded(1).rewards) == [1.0] * 3
    assert child.failed(0).problem is RewardProblem.TIMED_OUT
    assert numbers(child.rewarded(1).rewards) == [1.0] * 3


def test_the_process_of_the_functions_offers_itself_when_memory_runs_out(child: Child, functions: Functions) -> None:
    path = functions("def f(prompts): return [float(open('/proc/self/oom_score_adj').read())] * 3")
    child.open((f"{path}:f", 1.0))
    assert numbers(child.rewarded().rewards) == [1000.0] * 3


def test_a_completion_of_a_stop_token_alone_is_an_empty_text_and_functions_get_it(
    child: Child, functions: Functions
) -> None:
    path = functions(
        "def f(completions, completion_lengths, finish_reasons):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [float((t, n, r) == ('', 1, 'stop')) \n"
        "        for t, n, r in zip(texts, completion_lengths, finish_reasons)]\n"
    )
    child.open((f"{path}:f", 1.0))
    assert numbers(child.rewarded(0, ["", "7", ""]).rewards) == [1.0, 0.0, 1.0]


def test_a_function_that_forks_is_answered_once(child: Child, functions: Functions) -> None:
    path = functions(
        "import os\ndef f(prompts):\n    children = [os.fork() for _ in range(3)]\n    return [1.0] * len(prompts)\n"
    )
    child.open((f"{path}:f", 1.0))
    for count in (3, 2, 1, 2):
        assert numbers(child.rewarded(0, TEXTS[:count]).rewards) == [1.0] * count


@pytest.mark.parametrize("workers", [1, 4])
def test_what_functions_print_is_passed_on_up_to_a_limit_that_processes_share(
    workers: int, child: Child, functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex.rewards.child.OUTPUT_LIMIT_BYTES", 100_000)
    path = functions(
        "import sys\n"
        "print('imported')\n"
        "def f(prompts):\n"
        "    print('hello', file=sys.stderr)\n"
        "    for _ in range(100): print('x' * 100_000)\n"
        "    return [1.0] * len(prompts)\n"
    )
    child.open((f"{path}:f", 1.0), workers=workers)
    for _ in range(8):
        child.rewarded()
    text = child.printed.decode()
    assert "imported" in text
    assert "hello" in text
    assert 1 <= text.count("is dropped") <= workers
    assert len(text) < 101_000


LIMIT = r"it may have {} bytes of address space \(rewards.memory_limit\)\. Raise rewards.memory_limit, or take it out\."


def test_a_limit_too_small_for_the_process_itself_is_named(child: Child, functions: Functions) -> None:
    path = functions("def f(prompts): return [1] * 3\n")
    with pytest.raises(RewardError, match="ended while it imported them; got ended .*; " + LIMIT.format(2**20)):
        child.open((f"{path}:f", 1.0), memory=2**20)


def test_a_limit_too_small_for_an_import_is_named(child: Child, functions: Functions) -> None:
    path = functions("table = bytearray(2**33)\ndef f(prompts): return [1] * 3\n")
    with pytest.raises(RewardError, match="fails to import; got MemoryError(.|\\n)*\n" + LIMIT.format(2**30)):
        child.open((f"{path}:f", 1.0), memory=2**30)


@pytest.mark.parametrize(("code", "memory"), [("os._exit(1)", 0), ("raise ValueError('bad')", 2**30)])
def test_where_no_limit_is_to_blame_none_is_named(code: str, memory: int, child: Child, functions: Functions) -> None:
    path = functions(f"import os\n{code}\ndef f(prompts): return [1] * 3\n")
    with pytest.raises(RewardError) as caught:
        child.open((f"{path}:f", 1.0), memory=memory)
    assert "memory_limit" not in str(caught.value)


@pytest.mark.parametrize("apart", ["start_new_session=True", "process_group=0"])
def test_plain_children_of_a_function_are_ended_and_those_that_left_its_group_are_not(
    apart: str, child: Child, functions: Functions
) -> None:
    path = functions(
        "import subprocess\n"
        "def f(prompts):\n"
        "    plain = subprocess.Popen(['sleep', '60'])\n"
        f"    own = subprocess.Popen(['sleep', '60'], {apart})\n"
        "    return [plain.pid, own.pid, 0]\n"
    )
    child.open((f"{path}:f", 1.0))
    plain, own, _ = map(int, numbers(child.rewarded().rewards))
    child.service.close()
    try:
        wait_until(lambda: plain not in processes_with("sleep"))
        assert own in processes_with("sleep")
    finally:
        os.kill(own, signal.SIGKILL)
