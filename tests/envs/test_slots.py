"""A first-in, first-out semaphore: who releases a slot waits behind all that waited before."""

import threading

from rllib_srl.envs.slots import Slots
from tests.waiting import wait_until


def test_slots_are_handed_out_in_the_order_of_the_requests():
    slots, order, threads = Slots(1), [], []
    assert slots.acquire(60.0)

    def take(name: int) -> None:
        assert slots.acquire(60.0)
        order.append(name)
        slots.release()

    for name in range(5):
        threads.append(threading.Thread(target=take, args=(name,)))
        threads[-1].start()
        assert wait_until(lambda: len(slots._waiting) == len(threads))  # it waits behind the others
    assert not slots.acquire(0.01)
    slots.release()
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]
    assert slots.acquire(0.0)
