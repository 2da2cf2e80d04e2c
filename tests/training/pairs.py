"""A program in two real processes on loopback, four CPU devices each; what they say goes to files, so that none waits for a reader."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 300  # for whatever is waited for: a machine may be slow, and busy with other things

# `gammalm` itself; with HOLD_AT its step of that number waits before it is dispatched, until the file HOLD is there.
GAMMALM = """
import os, sys, time
from gammalm.cli.main import main
from gammalm.training.program import Program
step, taken = Program.step, []
def held(*arguments):
    taken.append(1)
    if len(taken) == int(os.environ["HOLD_AT"]):
        print("held", flush=True)
        while not os.path.exists(os.environ["HOLD"]):
            time.sleep(0.02)
    return step(*arguments)
if "HOLD_AT" in os.environ:
    Program.step = held
sys.exit(main(sys.argv[1:]))
"""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Pair:
    """`program` (Python source) twice with `arguments`; killed at the end of the block if they still run.

    They find each other by flags, or with `flags=False` by the environment. `hold_at`: per process, see GAMMALM. Further words go to the
    environment of both. Programs are compiled with hardly any optimization: programs over several CPU devices are not kept compiled.
    """

    def __init__(self, folder: Path, program: str, *arguments, flags: bool = True, hold_at: tuple[int, int] | None = None, **env):
        folder.mkdir(parents=True, exist_ok=True)
        self._go = folder / "go"
        self._said = [folder / f"said-{i}.txt" for i in range(2)]
        self.processes = []
        address = f"127.0.0.1:{_free_port()}"
        for i in range(2):
            asked = {"coordinator": address, "processes": "2", "process-id": str(i)}
            its = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"} | env
            its |= {"HOLD_AT": str(hold_at[i]), "HOLD": str(self._go)} if hold_at else {}
            command = [sys.executable, "-c", program, *map(str, arguments)]
            if flags:
                command += [word for name, value in asked.items() for word in (f"--{name}", value)]
            else:
                its |= {f"GAMMALM_{name.upper().replace('-', '_')}": value for name, value in asked.items()}
            with open(self._said[i], "w") as said:
                self.processes.append(subprocess.Popen(command, env=its, stdout=said, stderr=subprocess.STDOUT))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, i: int) -> str:
        return self._said[i].read_text()

    def until(self, i: int, text: str) -> None:
        """Waits until process `i` has said `text`."""
        deadline = time.monotonic() + SECONDS
        while text not in self.said(i):
            assert self.processes[i].poll() is None, f"process {i} ended before it said {text!r}: {self.said(i)}"
            assert time.monotonic() < deadline, f"process {i} did not say {text!r}: {self.said(i)}"
            time.sleep(0.05)

    def until_held(self) -> None:
        for i in range(2):
            self.until(i, "held")

    def go_on(self) -> None:
        self._go.touch()

    def status(self, i: int) -> int:
        return self.processes[i].wait(SECONDS)

    def ended(self) -> list[int]:
        """The exit status of both."""
        return [self.status(i) for i in range(2)]

    def told(self) -> str:
        return "\n".join(f"---- process {i}\n{self.said(i)}" for i in range(2))
