"""The tasks: valid and corrupt files in the formats of the data sets, and generated data."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from realdata import colours, write_celeba, write_chairs, write_nyu
from scipy.io import savemat

from lrd_uq.data import motorcycle
from lrd_uq.data.celeba import EYES, CelebA
from lrd_uq.data.depth import NyuDepth, RenderedRooms
from lrd_uq.data.files import read_colour, read_flo, resize_known, write_flo
from lrd_uq.data.flow import FlyingChairs, MovingLayers
from lrd_uq.data.layers import moving_layers
from lrd_uq.data.natural import STRIPS, NaturalPictures
from lrd_uq.data.pictures import Colourisation, Inpainting
from lrd_uq.data.reading import BrokenFile
from lrd_uq.data.rooms import room
from lrd_uq.data.series import RegionalDemand, regional_demand
from lrd_uq.data.table import CellMeasurements
from lrd_uq.data.task import LazyItems, random_split


def test_flo_files_are_read_as_written(tmp_path):
    flow = torch.randn(2, 5, 7)
    write_flo(tmp_path / "a.flo", flow)
    assert (tmp_path / "a.flo").read_bytes()[:4] == b"PIEH"
    assert torch.equal(read_flo(tmp_path / "a.flo"), flow)


@pytest.mark.parametrize("content", [b"", b"PIEH", b"JUNK" + bytes(20)])
def test_what_is_no_flo_file_is_named(tmp_path, content):
    (tmp_path / "bad.flo").write_bytes(content)
    with pytest.raises(BrokenFile, match=r"bad\.flo is not a \.flo file"):
        read_flo(tmp_path / "bad.flo")


def test_truncated_flo_file_is_named(tmp_path):
    write_flo(tmp_path / "a.flo", torch.zeros(2, 5, 7))
    (tmp_path / "a.flo").write_bytes((tmp_path / "a.flo").read_bytes()[:-1])
    with pytest.raises(BrokenFile, match=r"a\.flo is broken: 7 x 5 pixels need 292 bytes, it has 291"):
        read_flo(tmp_path / "a.flo")


def test_means_are_of_what_is_known():
    values = torch.tensor([5.0, 5.0, 900.0, 900.0]).expand(1, 2, 4)
    known = values < 100
    mean, enough = resize_known(values, known, (1, 2))
    assert mean.tolist() == [[[5.0, 0.0]]]
    assert enough.tolist() == [[[True, False]]]
    assert not resize_known(values, torch.zeros_like(known), (1, 2))[1].any()


class TestCelebA:
    def test_parts_follow_the_partition_of_celeba(self, tmp_path):
        data = CelebA(str(write_celeba(tmp_path / "faces")), size=(40, 40))
        assert [[path.stem for path in part] for part in data.split()] == [list("012345"), list("67"), list("89")]
        assert len(data.dataset("train")) == 6
        picture = data.dataset("test")[1].target
        truth = torch.from_numpy(colours(9, 40, 40)).movedim(-1, 0) / 255
        assert (picture - truth).abs().max() < 0.1  # JPEG

    def test_eyes_are_as_many_pixels_as_the_paper_counts(self):
        top, left, bottom, right = Inpainting(EYES).box(256, 256)
        assert (bottom - top) * (right - left) == 29750

    def test_questions(self, tmp_path):
        folder = str(write_celeba(tmp_path / "faces"))
        x, target, mask = CelebA(folder, size=(32, 32)).part("val")
        assert x.shape == (2, 4, 32, 32)
        assert (x[:, :3][mask] == 0).all()
        assert torch.equal(x[:, 3:].bool(), ~mask[:, :1])
        assert torch.equal(x[:, :3][~mask], target[~mask])
        x, target, mask = CelebA(folder, Colourisation(), size=(32, 32)).part("val")
        assert x.shape == (2, 1, 32, 32)
        assert mask is None
        assert (x >= target.amin(1, keepdim=True) - 1e-6).all()
        assert (x <= target.amax(1, keepdim=True) + 1e-6).all()

    @pytest.mark.parametrize("how", ["cut", "gone", "text"])
    def test_broken_picture_is_refused_or_skipped(self, tmp_path, how):
        folder = write_celeba(tmp_path / "faces")
        bad = folder / "CelebA-HQ-img" / "3.jpg"
        if how == "gone":
            bad.unlink()
        else:
            bad.write_bytes(bad.read_bytes()[:200] if how == "cut" else b"not a picture")
        with pytest.raises(BrokenFile, match=r"3\.jpg"):
            CelebA(str(folder), size=(32, 32)).part("train")
        with pytest.warns(UserWarning, match=r"skipped: .*3\.jpg"):
            kept = CelebA(str(folder), size=(32, 32), on_broken="skip").part("train")
        assert len(kept.target) == 5
        assert kept.target.std(dim=(1, 2, 3)).min() > 0.05  # no silent zeros

    @pytest.mark.parametrize(
        ("file", "line", "said"),
        [
            ("list_eval_partition.txt", "000001.jpg 7", "must have a file name and 0, 1 or 2"),
            ("CelebA-HQ-to-CelebA-mapping.txt", "3 x", "must have two numbers and a file name"),
            ("CelebA-HQ-to-CelebA-mapping.txt", "77 4 000004.jpg", "which is missing in"),
        ],
    )
    def test_broken_lists_are_named(self, tmp_path, file, line, said):
        path = write_celeba(tmp_path / "faces") / file
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(BrokenFile, match=said):
            CelebA(str(tmp_path / "faces")).setup()

    def test_missing_list_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"list_eval_partition\.txt"):
            CelebA(str(tmp_path)).setup()


class TestFlyingChairs:
    def test_motion_shrinks_with_the_frames(self, tmp_path):
        data = FlyingChairs(str(write_chairs(tmp_path / "chairs")), size=(12, 16), unit=2.0)
        x, flow, known = data.pair("00004")  # moves by (3, -6) pixels
        assert x.shape == (6, 12, 16)
        assert torch.allclose(flow[0], torch.tensor(3 / 2 / 2.0))
        assert torch.allclose(flow[1], torch.tensor(-6 / 2 / 2.0))
        assert known.all()

    def test_split_of_the_paper(self):
        train, val, test = random_split(22872, 42, 0.8, 0.1)
        assert (len(train), len(val), len(test)) == (18297, 2287, 2288)
        assert sorted(train + val + test) == list(range(22872))

    def test_split_files(self, tmp_path):
        folder, file = str(write_chairs(tmp_path / "chairs")), tmp_path / "split.txt"
        file.write_text("1\n1\n2\n1\n3\n1\n1\n1\n2\n1\n")
        assert FlyingChairs(folder, str(file)).split(10) == ([0, 1, 3, 5, 6, 7, 9], [2, 8], [4])
        file.write_text("1\n1\n2\n1\n1\n1\n1\n1\n2\n1\n")  # as FlyingChairs_train_val.txt: no test pairs of its own
        train, val, test = FlyingChairs(folder, str(file)).split(10)
        assert (len(train), len(val), test) == (7, 1, [2, 8])
        assert sorted(train + val + test) == list(range(10))
        file.write_text("1\n2\n")
        with pytest.raises(BrokenFile, match="for each of 10 pairs; it has 2 lines"):
            FlyingChairs(folder, str(file)).setup()

    @pytest.mark.parametrize("name", ["00002_flow.flo", "00002_img2.ppm"])
    def test_broken_pair_is_refused_or_skipped(self, tmp_path, name):
        folder = write_chairs(tmp_path / "chairs")
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
        options = {"size": (12, 16), "split": str(tmp_path / "split.txt")}
        (tmp_path / "split.txt").write_text("1\n" * 6 + "2\n" * 2 + "3\n" * 2)
        with pytest.raises(BrokenFile, match=name):
            FlyingChairs(str(folder), **options).part("train")
        with pytest.warns(UserWarning, match=f"skipped: .*{name}"):
            assert len(FlyingChairs(str(folder), on_broken="skip", **options).part("train").target) == 5

    def test_unknown_flow_is_masked(self, tmp_path):
        folder = write_chairs(tmp_path / "chairs", count=1)
        flow = read_flo(folder / "00001_flow.flo") + 1
        flow[:, :, :16] = 1e10
        write_flo(folder / "00001_flow.flo", flow)
        _, target, known = FlyingChairs(str(folder), size=(12, 16)).pair("00001")
        assert not known[:, :, :7].any()
        assert known[:, :, 9:].all()
        assert target.abs().max() < 1


class TestNyu:
    @pytest.mark.parametrize("hdf5", [False, True])
    def test_numbers_begin_with_one_and_arrays_are_transposed(self, tmp_path, hdf5):
        folder = write_nyu(tmp_path, hdf5_splits=hdf5)
        data = NyuDepth(str(folder / "nyu_depth_v2_labeled.mat"), str(folder / "splits.mat"), size=(24, 32))
        x, metres, known = data.part("test")  # numbers 1, 3, 5, ...: distances of 1, 3, 5, ... metres
        assert x.shape == (6, 3, 24, 32)
        assert [float(m[k].mean()) for m, k in zip(metres, known, strict=True)] == [1, 3, 5, 7, 9, 11]
        assert torch.allclose(x[1], torch.from_numpy(colours(2, 24, 32)).movedim(-1, 0) / 255)
        assert (len(data.dataset("train")), len(data.dataset("val"))) == (4, 2)
        assert not known[:, :, :, :16].any()  # the left half was not measured
        assert known[:, :, :, 16:].all()

    def test_distances_filled_in(self, tmp_path):
        folder = write_nyu(tmp_path)
        files = (str(folder / "nyu_depth_v2_labeled.mat"), str(folder / "splits.mat"))
        assert NyuDepth(*files, raw=False, size=(12, 16)).part("test").mask.all()

    def test_broken_files_are_named(self, tmp_path):
        folder = write_nyu(tmp_path)
        file, splits = folder / "nyu_depth_v2_labeled.mat", folder / "splits.mat"
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(BrokenFile, match=r"labeled\.mat is not an HDF5 file, or is truncated"):
            NyuDepth(str(file), str(splits)).setup()
        file.write_bytes(whole)
        savemat(splits, {"trainNdxs": [[0, 1]], "testNdxs": [[2]]})
        with pytest.raises(BrokenFile, match="does not fit 12 pairs"):
            NyuDepth(str(file), str(splits)).setup()
        splits.write_bytes(b"MATLAB 5.0 but no more")
        with pytest.raises(BrokenFile, match=r"splits\.mat is corrupt or truncated"):
            NyuDepth(str(file), str(splits)).setup()
        with pytest.raises(FileNotFoundError, match=r"gone\.mat"):
            NyuDepth(str(file), str(tmp_path / "gone.mat")).setup()


def test_photographs_of_the_parts_do_not_overlap():
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(STRIPS))
    data = NaturalPictures(size=(24, 24), train=4, val=2, test=2)
    x, target, mask = data.part("train")
    assert x.shape == (4, 4, 24, 24)
    assert mask.float().mean() == 0.25
    assert target.std() > 0.05
    assert torch.equal(data.part("train").target, target)  # the same whenever it is asked for
    assert not torch.equal(NaturalPictures(size=(24, 24), train=4, split_seed=1).part("train").target, target)


def test_flow_of_moving_layers_is_exact():
    """The second frame, warped back along the flow, equals the first, except at occlusions."""
    errors = []
    for seed in range(6):
        first, second, flow = moving_layers((48, 64), 2, 0, torch.Generator().manual_seed(seed))
        ys, xs = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
        place = torch.stack([xs + flow[0], ys + flow[1]], -1)
        inside = ((place >= 1) & (place <= torch.tensor([62.0, 46.0]))).all(-1)
        grid = (place + 0.5) / torch.tensor([64.0, 48.0]) * 2 - 1
        back = torch.nn.functional.grid_sample(second[None], grid[None], align_corners=False)[0]
        errors.append((back - first).abs().mean(0)[inside])
        still = (second - first).abs().mean(0)[inside]
        assert float(errors[-1].median()) < 0.35 * float(still.median())
        assert flow.abs().max() > 1
    assert float(torch.cat(errors).median()) < 0.02


def test_distances_of_a_room():
    """Distances are plausible and vary, and there are few holes."""
    for seed in range(5):
        picture, metres, known = room((48, 64), 0, torch.Generator().manual_seed(seed))
        assert picture.shape == (3, 48, 64)
        assert 0.5 < known.float().mean() < 1
        seen = metres[known]
        assert seen.min() > 0.05
        assert seen.max() < 10
        assert seen.std() > 0.1


def test_motorcycle_has_true_distances():
    left, right, disparity, known = motorcycle.pair()
    assert left.shape == right.shape == (3, 500, 741)
    assert 0.7 < known.float().mean() < 1
    # The right picture, shifted by the disparity, is the left one.
    columns = (torch.arange(741) - disparity[0].round().long()).clamp(min=0)
    shifted = right.gather(2, columns.expand(3, -1, -1))
    there = known[0] & (columns > 0)
    assert (shifted - left).abs().mean(0)[there].median() < 0.3 * (right - left).abs().mean(0)[there].median()
    _, metres, there = motorcycle.depth((50, 74))
    assert 1.5 < float(metres[there].min()) < 3
    assert float(metres[there].max()) < 8
    data = MovingLayers(size=(48, 64), test=3, test_on="motorcycle")
    x, flow, mask = data.part("test")
    assert x.shape == (3, 6, 48, 64)
    assert (flow[:, 1] == 0).all()
    assert mask.float().mean() > 0.5
    assert len(RenderedRooms(size=(48, 64), test_on="motorcycle").part("test").target) == 1
    with pytest.raises(ValueError, match="test_on must be one of generated, motorcycle; got 'car'"):
        RenderedRooms(test_on="car")


def test_regions_share_their_weather():
    weeks = regional_demand(12 * 168, 5, 0).view(5, 12, 168)
    beyond_rhythm = (weeks - weeks.mean(1, keepdim=True)).flatten(1)
    assert torch.corrcoef(beyond_rhythm).min() > 0.4
    data = RegionalDemand(regions=5, history=10, horizon=4, train=20, val=5, test=5)
    x, target, _ = data.part("train")
    assert x.shape == (20, 5, 12)
    assert torch.equal(x[4, :, :10][:, 4:], x[8, :, :10][:, :6])  # windows move by an hour
    assert torch.equal(target[0], x[4, :, 6:10])


def test_table_is_standardised_by_its_training_samples():
    data = CellMeasurements()
    x, target, _ = data.part("train")
    assert x.shape == (341, 20)
    assert target.shape == (341, 10)
    assert target.mean(0).abs().max() < 1e-4
    assert [len(data.dataset(part)) for part in ("val", "test")] == [113, 115]
    assert torch.corrcoef(target.T).fill_diagonal_(0).max() > 0.9  # radius, perimeter and area


def test_items_all_broken_are_no_batch():
    def make(_):
        raise BrokenFile("gone.jpg is broken")

    with pytest.raises(BrokenFile, match="none can be read"), pytest.warns(UserWarning, match=r"gone\.jpg"):
        LazyItems("abc", make, "skip").__getitems__([0, 1])
    with pytest.raises(ValueError, match="on_broken must be one of"):
        LazyItems("abc", make, "ignore")


def test_frames_to_predict_come_in_pairs(tmp_path):
    data = MovingLayers(size=(12, 16))
    for frame in (1, 2):
        Image.fromarray(colours(frame, 24, 32)).save(tmp_path / f"a_img{frame}.png")
    (path,) = data.inputs_of(tmp_path)
    x, target, _ = data.read(path)
    assert x.shape == (6, 12, 16)
    frames = [read_colour(tmp_path / f"a_img{i}.png", (12, 16)) for i in (1, 2)]
    assert torch.allclose(x[:3], frames[0])
    assert torch.allclose(x[:3] + x[3:] / 4, frames[1], atol=1e-6)
    assert target.isnan().all()
    assert np.allclose(data.style.seen(x).shape, (12, 16, 3))
    (tmp_path / "a_img1.png").unlink()
    with pytest.raises(FileNotFoundError, match="_img1"):
        data.inputs_of(tmp_path)
