"""A network over tiles: two processes train one network on one image each, of which each holds half of the rows.

Every process predicts its half of the image: a mean, a diagonal and a factor. The halves are one Gaussian, so that
correlations reach from one half to the other. The parameters are the same on both processes; their gradients are summed
over the processes that share an image.

    torchrun --nproc-per-node 2 docs/examples/tiles.py
"""

import torch
import torch.distributed as dist

import lrd_kernels as lrd

SIDE, RANK, STEPS = 32, 4, 20


def image(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target [1, 1, SIDE, SIDE]: noise of its own for every pixel, and a brightness that all pixels share."""
    generator = torch.Generator().manual_seed(step)
    given = torch.randn(1, 1, SIDE, SIDE, generator=generator)
    brightness = torch.randn(1, generator=generator)
    return given, given + brightness + 0.1 * torch.randn(1, 1, SIDE, SIDE, generator=generator)


def main() -> list[float]:
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * SIDE // processes, (rank + 1) * SIDE // processes)  # the tile of this process
    torch.manual_seed(0)  # the same parameters everywhere
    net = torch.nn.Conv2d(1, 2 + RANK, 1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        given, target = (tensor[:, :, rows] for tensor in image(step))
        mean, raw_diag, *columns = net(given).flatten(2).unbind(1)  # each [1, outputs of the tile]
        loss = lrd.distributed.nll_loss(mean, raw_diag, torch.stack(columns, -1), target.flatten(1))
        optimiser.zero_grad()
        loss.backward()
        for parameter in net.parameters():  # every process has the gradient for its own tile
            dist.all_reduce(parameter.grad)
        optimiser.step()
        losses.append(float(loss.detach()))
    if rank == 0:
        print(f"loss per pixel: {losses[0]:.4f} before, {losses[-1]:.4f} after {STEPS} steps on {processes} processes")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
