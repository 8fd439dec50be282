"""Every measure on cases small enough to do by hand."""

import pytest
import torch
from scipy.stats import binomtest

from benchmarks import metrics


class TestEvidenceCells:
    def test_a_box_takes_the_cells_that_it_reaches_into(self):
        cells = metrics.evidence_cells([(32, 0, 96, 32)], (2, 4), (64, 128))
        assert cells.tolist() == [[False, True, True, False], [False] * 4]

    def test_a_graze_is_none_and_a_tiny_box_is_one(self):
        graze = metrics.evidence_cells([(30, 0, 64, 32)], (2, 4), (64, 128))  # 2 of 32 px of the first cell
        assert graze.sum() == 1 and graze[0, 1]
        assert metrics.evidence_cells([(126, 62, 128, 64)], (2, 4), (64, 128)).nonzero().tolist() == [[1, 3]]

    def test_no_box_no_cell_and_two_boxes_their_union(self):
        assert not metrics.evidence_cells([], (2, 2), (64, 64)).any()
        assert metrics.evidence_cells([(0, 0, 32, 32), (0, 0, 64, 32)], (2, 2), (64, 64)).sum() == 2

    def test_the_image_may_be_of_another_size_than_its_cells(self):
        assert metrics.evidence_cells([(0, 0, 10, 10)], (2, 2), (20, 20)).nonzero().tolist() == [[0, 0]]


class TestChoices:
    kept = torch.tensor([[1, 0, 0], [1, 0, 1], [2, 0, 2]])  # two fine cells, four cells in one coarse token; 2 x 4 grid
    grid = (2, 4)

    def test_by_hand(self):
        density = metrics.homunculus(self.kept, self.grid)
        assert density.tolist() == [[1, 1, 0.25, 0.25], [0, 0, 0.25, 0.25]]
        evidence = torch.tensor([[False, True, True, False], [False] * 4])
        assert metrics.evidence_recall(density, evidence) == 0.5
        assert metrics.box_mass(density, evidence) == pytest.approx(1.25 / 3)
        # The two most magnified cells are (0, 0) and (0, 1): one of them is evidence, three cells in the union.
        assert metrics.box_iou(density, evidence) == pytest.approx(1 / 3)

    def test_ties_count_by_their_share(self):
        evidence = torch.tensor([[True, False], [False, False]])
        flat = torch.full((2, 2), 0.25)
        assert metrics.box_iou(flat, evidence) == pytest.approx(0.25 / 1.75)
        assert metrics.pointing_game(flat, evidence) == 0.25
        assert metrics.pointing_game(torch.tensor([[0.9, 0.2], [0.1, 0.3]]), evidence) == 1

    def test_heat_tells_cells_of_one_scale_apart_and_never_outweighs_a_scale(self):
        evidence = torch.tensor([[True, False, False]])
        density = torch.tensor([[1.0, 1.0, 0.25]])
        assert metrics.box_iou(density, evidence) == pytest.approx(0.5 / 1.5)
        assert metrics.box_iou(density, evidence, torch.tensor([[0.9, 0.2, 1.0]])) == 1
        assert metrics.box_iou(density, evidence, torch.tensor([[0.1, 0.2, 1.0]])) == 0

    def test_perfect_is_one(self):
        evidence = torch.tensor([[True, True], [False, False]])
        density = evidence.double()
        assert metrics.box_iou(density, evidence) == metrics.box_mass(density, evidence) == 1

    def test_placement_is_none_without_evidence(self):
        assert metrics.placement(self.kept, self.grid, [], (64, 128)) == dict.fromkeys(
            ("evidence_recall", "box_mass", "iou", "pointing_hit")
        )
        full = metrics.placement(self.kept, self.grid, [(0, 0, 64, 32)], (64, 128))
        assert full == {"evidence_recall": 1, "box_mass": pytest.approx(2 / 3), "iou": 1, "pointing_hit": 1}

    def test_distinctiveness(self):
        a, b = torch.tensor([[1.0, 0]]), torch.tensor([[0.0, 2]])
        assert metrics.distinctiveness([a, b]) == pytest.approx(1)
        assert metrics.distinctiveness([a, 3 * a]) == pytest.approx(0)
        assert metrics.distinctiveness([a, a, b]) == pytest.approx(2 / 3)

    def test_calibration(self):
        scores = torch.tensor([0.05, 0.05, 0.95, 0.95])
        counts = metrics.reliability(scores, torch.tensor([False, False, True, False]))
        assert counts[:, 0].tolist() == [2, *[0] * 8, 2] and counts[9].tolist() == pytest.approx([2, 1.9, 1])
        assert metrics.calibration_error(counts) == pytest.approx(0.5 * 0.05 + 0.5 * 0.45)
        assert metrics.calibration_error(2 * counts) == metrics.calibration_error(counts)
        assert metrics.calibration_error(metrics.reliability(torch.ones(1), torch.tensor([True]))) == 0


class TestAnswers:
    @pytest.mark.parametrize(("hits", "n"), [(0, 10), (10, 10), (45, 50), (1, 2000)])
    def test_wilson_is_scipys(self, hits, n):
        wanted = binomtest(hits, n).proportion_ci(method="wilson")
        assert metrics.wilson(hits, n) == pytest.approx((wanted.low, wanted.high), abs=1e-4)

    def test_wilson_of_nothing_is_everything(self):
        assert metrics.wilson(0, 0) == (0.0, 1.0)

    def test_mcnemar_by_hand(self):
        a = [True] * 6 + [False] * 1 + [True] * 3
        b = [False] * 6 + [True] * 1 + [True] * 3
        result = metrics.mcnemar(a, b)
        # 6 against 1 of 7 discordant: 2 (C(7, 0) + C(7, 1)) / 2^7
        assert result == {"only_a": 6, "only_b": 1, "p": pytest.approx(16 / 128)}
        assert metrics.mcnemar(a, a)["p"] == 1

    @pytest.mark.parametrize(("one", "other"), [(30, 12), (5, 5), (0, 9)])
    def test_mcnemar_is_the_binomial_test(self, one, other):
        a, b = [True] * one + [False] * other, [False] * one + [True] * other
        assert metrics.mcnemar(a, b)["p"] == pytest.approx(binomtest(one, one + other).pvalue)

    def test_mcnemar_of_thousands(self):
        a, b = [True] * 620 + [False] * 540, [False] * 620 + [True] * 540
        assert metrics.mcnemar(a, b)["p"] == pytest.approx(binomtest(620, 1160).pvalue, rel=0.02)

    def test_mcnemar_wants_pairs(self):
        with pytest.raises(ValueError, match="paired"):
            metrics.mcnemar([True], [True, False])

    def test_percentile_is_a_value_that_occurs(self):
        assert metrics.percentile([5, 1, 4, 2, 3], 0.95) == 5
        assert metrics.percentile(range(1, 101), 0.95) == 95
        assert metrics.percentile([7], 0.5) == 7
