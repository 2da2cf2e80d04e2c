"""Worker processes for preparing: a pool that ends with its parent, whatever ends the parent."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
import time


@contextlib.contextmanager
def pool(workers: int):
    """A function that maps `function` over argument tuples in processes (0: in this one) and yields (position, result) as they finish."""
    if not workers:
        yield lambda function, arguments: ((i, function(*a)) for i, a in enumerate(arguments))
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of a JAX that may be running here
    others = multiprocessing.active_children()
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_worker_start) as executor:

        def run(function, arguments):
            futures = {executor.submit(function, *a): i for i, a in enumerate(arguments)}
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()

        try:
            yield run
        except BaseException:  # Ctrl-C too: what the workers still do is of no use
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                if worker not in others:
                    worker.terminate()
            raise


def _worker_start():
    """Ctrl-C ends the parent, which ends the workers; a parent that was killed cannot, so they look for it themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
