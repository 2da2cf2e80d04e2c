"""kill -9 at any moment of saving leaves a whole step behind: at random moments, and at each point between two acts on the disk.

One program imports JAX and forks a child per life (before JAX has started anything). A child restores, checks, reports, and saves
until it is killed; the next one must find at least the last step that was reported complete.
"""

import subprocess
import sys

HARNESS = r'''
import os, random, select, shutil, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from gammalm.training import checkpoint
from gammalm.training.checkpoint import Checkpointer

DIRECTORY, MODE = sys.argv[1:3]

def state(step):
    rng = np.random.default_rng(step)
    w, m = rng.normal(size=(3, 500)).astype(np.float32), rng.integers(9, size=400).astype(np.int32)
    return {"w": jnp.asarray(w), "o": {"m": jnp.asarray(m)}, "step": jnp.int32(step)}

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def arm(point):
    """Makes this process kill itself at `point` of the third save, when the first two are there and rotation begins."""
    seen = {"n": 0}
    def at(module, name, when, before=True):
        real = getattr(module, name)
        def hooked(*a, **k):
            if when(*a):
                if not before:
                    real(*a, **k)
                die()
            return real(*a, **k)
        setattr(module, name, hooked)
    def third(*_):
        seen["n"] += 1
        return seen["n"] == 3
    named = lambda suffix: lambda a, *_: str(a).endswith(suffix) and third()
    if point == "before seal": at(checkpoint, "seal", third)
    elif point == "after seal": at(checkpoint, "seal", third, before=False)
    elif point == "after naming": at(os, "rename", named(".saving"), before=False)
    elif point == "before deleting": at(shutil, "rmtree", lambda a, *_: str(a).endswith(".deleting"))
    elif point == "half deleted":
        real = shutil.rmtree
        def half(folder, *a, **k):
            if str(folder).endswith(".deleting"):
                real(os.path.join(folder, "d"))
                die()
            return real(folder, *a, **k)
        shutil.rmtree = half
    else: raise SystemExit(point)

def life(out, point):
    if point:
        arm(point)
    c = Checkpointer(DIRECTORY, keep=2)
    found = c.restore_latest(jax.eval_shape(lambda: state(0)))
    step = 0
    if found:
        step, tree, extra = found
        expected = state(step)
        assert extra == {"step": step} and all(
            np.asarray(a).tobytes() == np.asarray(b).tobytes()
            for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)), step
    os.write(out, f"restored {step}\n".encode())
    while True:
        step += 1
        c.save(step, state(step), {"step": step})
        if step % 2 == 0:
            c.wait()
            os.write(out, f"complete {step}\n".encode())

def run(point, reports, delay):
    """One life: (step restored, last step reported complete). Killed `delay` seconds after that many reports, or by itself at `point`."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(r)
            life(w, point)
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
    os.close(w)
    text, deadline = "", time.monotonic() + 30
    kill_at = None
    while True:
        now = time.monotonic()
        if kill_at and now >= kill_at or now > deadline:
            os.kill(pid, signal.SIGKILL)
            break
        if select.select([r], [], [], min(0.05, max(0, (kill_at or deadline) - now)))[0]:
            data = os.read(r, 4096)
            if not data:
                break
            text += data.decode()
            if not point and not kill_at and text.count("\n") >= reports:
                kill_at = time.monotonic() + delay
    _, status = os.waitpid(pid, 0)
    text += b"".join(iter(lambda: os.read(r, 4096), b"")).decode()
    os.close(r)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"ended by itself: {status} {text}"
    lines = [l.split() for l in text.splitlines()]
    return int(dict(lines[:1])["restored"]), max((int(s) for kind, s in lines if kind == "complete"), default=0)

floor, litter = 0, set()
rng = random.Random(0)
if MODE == "random":  # at once after the restore, or after the first report of a complete save
    lives = [(None, 1 + i % 2, rng.uniform(0.0, 0.25)) for i in range(10)]
else:
    lives = [(point, 0, 0) for point in MODE.split(",")]
for point, reports, delay in [*lives, (None, 1, 0.0)]:
    restored, complete = run(point, reports, delay)
    assert restored >= floor, (restored, floor, point, sorted(os.listdir(DIRECTORY)))
    floor = max(restored, complete)
    left = os.listdir(DIRECTORY)
    assert not any("damaged" in name for name in left), left
    litter |= {name.split(".", 1)[1] for name in left if "." in name}
    assert len(left) <= 5, left
    print(point or f"{delay:.2f} s", "restored", restored, "complete", complete, sorted(left), flush=True)
print("LITTER", sorted(litter))
print("END", floor)
'''


def harness(tmp_path, mode: str) -> str:
    result = subprocess.run([sys.executable, "-c", HARNESS, str(tmp_path), mode], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-4000:]}"
    return result.stdout


def test_killed_at_random_moments(tmp_path):
    out = harness(tmp_path, "random")
    assert int(out.split("END")[1]) >= 5, out  # every second life completes a save
    assert "saving" in out.split("LITTER")[1], out  # and some kills did fall into a save


def test_killed_between_two_acts_on_the_disk(tmp_path):
    points = {  # point -> the step that the next life must find
        "before seal": 2,  # step 3 has no checksums
        "after seal": 4,  # step 5 has no name
        "after naming": 7,
        "half deleted": 8,  # the first save of that life rotates
        "before deleting": 8,  # that life is killed clearing away what the last one left
    }
    out = harness(tmp_path, ",".join(points))
    found = [int(line.split("restored ")[1].split()[0]) for line in out.splitlines() if "restored" in line]
    assert found == [0, *points.values()], out
