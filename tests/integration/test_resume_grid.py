"""A sample of the resume grid: from two ranks to three stages; `resume_grid.py` runs all of it."""

import few_images
import resume_grid


def test_the_losses_after_a_resume_on_other_stages_and_ranks_are_the_same(tmp_path):
    few_images.prepare(tmp_path)
    before = resume_grid.turn(tmp_path, (2, 2, 2), 5)
    after = resume_grid.turn(tmp_path, (3, 4, 1), 5, "2-2-2")
    for optimizer in resume_grid.OPTIMIZERS:
        assert len(before[optimizer]) == 5
        assert len(set(before[optimizer])) > 1
        assert resume_grid.furthest(before[optimizer], after[optimizer]["2-2-2"], 5) < 1e-5
