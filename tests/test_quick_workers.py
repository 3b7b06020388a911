"""Ray's workers that start by a fork are as different as those that Ray starts."""

import os

import pytest


class Drawing:
    def draw(self):
        """Return the id of this process and an object's id, as Ray draws them."""
        from ray import ObjectRef

        return os.getpid(), ObjectRef.from_random().hex()


@pytest.mark.slow
def test_workers_do_not_draw_the_same_ids(ray_here):
    actors = [ray_here.remote(Drawing).options(num_cpus=0.1).remote() for _ in range(4)]
    try:
        # Ray's connection to a worker on a port that another has used may take it two minutes.
        drawn = ray_here.get([actor.draw.remote() for actor in actors], timeout=240)
    finally:
        for actor in actors:
            ray_here.kill(actor)
    processes, ids = zip(*drawn, strict=True)
    assert len({*processes}) == 4 == len({*ids})
