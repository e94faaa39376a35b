import multiprocessing
import time

from topr_trl.pipeline import locks


def _hold(folder, seconds):
    with locks.lock(folder):
        (folder / "held").touch()
        time.sleep(seconds)


def test_the_lock_ends_with_its_process(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path, 600))
    process.start()
    while not (tmp_path / "held").exists():
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    with locks.lock(tmp_path):  # does not wait
        pass


def _work(folder, order, part, seconds):
    with locks.lock(folder, part) if part else locks.lock_all(folder):
        order.put((time.monotonic(), f"{part or 'closing'} begins"))
        time.sleep(seconds)
        order.put((time.monotonic(), f"{part or 'closing'} ends"))


def test_workers_have_a_lock_each_and_who_closes_waits_for_them(tmp_path):
    context = multiprocessing.get_context("fork")
    order = context.Queue()
    workers = [context.Process(target=_work, args=(tmp_path, order, part, 1.0)) for part in ("-0-of-2", "-1-of-2")]
    for worker in workers:
        worker.start()
    seen = [order.get(timeout=10) for _ in range(2)]
    closing = context.Process(target=_work, args=(tmp_path, order, "", 0.0))
    closing.start()
    seen += [order.get(timeout=10) for _ in range(4)]
    # A queue does not keep the order of several processes.
    what = [event.rpartition(" ")[2] for _, event in sorted(seen)]
    assert what == ["begins", "begins", "ends", "ends", "begins", "ends"]
    assert sorted(seen)[-1][1] == "closing ends"
    for process in (*workers, closing):
        process.join()


def test_whether_other_workers_are_at_work(tmp_path):
    with locks.lock(tmp_path, "-0-of-2"):
        assert not locks.others_work(tmp_path, "-0-of-2")
        assert locks.others_work(tmp_path, "-1-of-2")
    assert not locks.others_work(tmp_path, "-1-of-2")
