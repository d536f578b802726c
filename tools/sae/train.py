"""Trains a small sparse autoencoder on a residual stream, so that features can be looked at offline.

    python tools/sae/train.py real:smollm2-135m --layer 15 --architecture topk --out out/sae

The rows are those of texts that come with kvinterp and of the model's own sampled continuations of them: the very runs that wrote
these (kv.generated), without rows of attention sinks (a norm above ten times the median). A fifth of the texts is held out. The
folder is in SAELens's form. This is a small autoencoder of few texts: good for trying tools, not for claims about features.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor

import kvinterp as kv
from kvinterp.comparison.sparse_autoencoder import SparseAutoencoder

BATCH, RATE, BANDWIDTH = 256, 1e-3, 0.05
"""Rows of a training step; Adam's rate; the width of JumpReLU's pseudo-derivative, in units of a row's mean size."""


class Step(torch.autograd.Function):
    """Whether a feature is above its threshold, with the pseudo-derivative of arXiv 2407.14435, equation 12."""

    @staticmethod
    def forward(ctx, before: Tensor, threshold: Tensor) -> Tensor:
        """The step."""
        ctx.save_for_backward(before, threshold)
        return (before > threshold).to(before)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        """A rectangle around the threshold."""
        before, threshold = ctx.saved_tensors
        near = ((before - threshold).abs() < BANDWIDTH / 2).to(before)
        return None, -(near / BANDWIDTH * gradient).sum(0)


def rows_of(model, layer: int, prompts: str, tokens: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Rows for training and held-out rows, and what they are divided by so that their mean square is 1."""
    torch.manual_seed(seed)
    parts: list[list[Tensor]] = [[], []]
    for number, prompt in enumerate(kv.load_prompts(prompts)):
        (text,) = kv.generated(
            model, [prompt], "resid_post", [layer], max_new_tokens=tokens, do_sample=True, temperature=1.0
        )
        parts[number % 5 == 4].append(text["resid_post", layer].float())
    train, held = (torch.cat(part) for part in parts)
    limit = 10 * train.norm(dim=1).median()
    train, held = (rows[rows.norm(dim=1) < limit] for rows in (train, held))
    scale = float(train.pow(2).mean().sqrt())
    return train / scale, held / scale, scale


def train(rows: Tensor, sae: SparseAutoencoder, steps: int, sparsity: float, seed: int) -> None:
    """Adam on the mean squared error; for JumpReLU with a penalty on how many features fire. Decoder rows keep the length 1."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(sae.parameters(), lr=RATE)
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        if sae.threshold is None:
            features, penalty = sae.encode(batch), 0.0
        else:
            before = sae.before(batch)
            fires = Step.apply(before, sae.threshold)
            features, penalty = before.relu() * fires, sparsity * min(2 * step / steps, 1) * fires.sum(1).mean()
        loss = (sae.decode(features) - batch).pow(2).sum(1).mean() / batch.pow(2).sum(1).mean() + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            sae.W_dec /= sae.W_dec.norm(dim=1, keepdim=True)


@torch.no_grad()
def measured(rows: Tensor, sae: SparseAutoencoder) -> dict[str, float]:
    """The share of the variance that is explained, how many features fire at a row, and the share that never fires."""
    features = sae.encode(rows)
    left = (rows - sae.decode(features)).pow(2).sum() / (rows - rows.mean(0)).pow(2).sum()
    fires = features != 0
    return {
        "rows": len(rows),
        "explained_variance": round(1 - float(left), 4),
        "features_at_a_row": round(float(fires.sum(1).float().mean()), 2),
        "never_fire": round(float((~fires.any(0)).float().mean()), 4),
    }


def main() -> None:
    """Records, trains, measures on held-out texts, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--architecture", choices=("topk", "jumprelu"), default="topk")
    parser.add_argument("--features", type=int, default=0, help="default: four times the width")
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--sparsity", type=float, default=3e-3, help="of JumpReLU: the weight of each feature that fires")
    parser.add_argument("--dtype", default="float16", help="of the model; on most CPUs float32 is the fastest")
    parser.add_argument("--prompts", default="natural:48")
    parser.add_argument("--tokens", type=int, default=128, help="sampled behind each text")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    began, model = time.perf_counter(), kv.load_model(options.model, dtype=options.dtype)
    rows, held, scale = rows_of(model, options.layer, options.prompts, options.tokens, options.seed)
    count = options.features or 4 * model.facts.width
    about = {"hook_name": f"blocks.{options.layer}.hook_resid_post", "model_name": model.facts.name}
    sae = SparseAutoencoder(options.architecture, model.facts.width, count, options.k, about)
    with torch.no_grad():
        torch.manual_seed(options.seed)
        sae.W_dec.copy_(torch.nn.functional.normalize(torch.randn(count, model.facts.width), dim=1))
        sae.W_enc.copy_(sae.W_dec.T)
        sae.b_dec.copy_(rows.mean(0))
        if sae.threshold is not None:
            sae.threshold.fill_(1.0)
    train(rows, sae, options.steps, options.sparsity, options.seed)
    found = {"train": measured(rows, sae), "held out": measured(held, sae)}
    with torch.no_grad():
        # From here on it takes rows as the model has them.
        sae.W_enc /= scale
        sae.W_dec *= scale
        sae.b_dec *= scale
    sae.metadata |= {"trained": vars(options), "measured": found}
    sae.save(options.out)
    print(json.dumps({**found, "seconds": round(time.perf_counter() - began, 1), "folder": options.out}))


if __name__ == "__main__":
    main()
