"""Speed and memory of the method, each as a ratio measured side by side in one run: `make bench`.

(a) calibration against the bare forward pass with logits, over the same tokens;      goal: at most 1.25 times
(b) all triples of a 36-layer fingerprint against singular values of concatenations;   goal: at least 30 times faster
(c) peak memory of a calibration over n and over 4 n prompts, each in its own process; goal: about 1

Ratios are medians over alternating repetitions, so that a slow spell of the machine falls on both sides. Numbers, not a test.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch

from elsi_lib.calibration import Calibration
from elsi_lib.prompts import load_prompts
from elsi_lib.selection import all_set_entropies
from elsi_lib.settings import PRESETS
from elsi_lib.targets import load_target


def timed(work) -> np.ndarray:
    """Wall seconds and processor seconds; the second do not count what other programs take."""
    start = np.array([time.perf_counter(), time.process_time()])
    work()
    return np.array([time.perf_counter(), time.process_time()]) - start


def spread(ratios: np.ndarray) -> str:
    return f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def bench_calibration(target_name: str, count: int, repeats: int) -> None:
    """Both sides run prompt by prompt, right after one another; a calibration as the preset `cpu` does it, closing included.

    Raw token spectra are computed for the first 64 of the preset's 200 prompts; here for the same share, spread evenly.
    """
    preset = PRESETS["cpu"]
    target = load_target(target_name)
    prompts, _ = load_prompts("sharegpt", count, 0, target.tokenizer, max_tokens=preset["max_tokens"], min_tokens=105)
    share = preset["spectra"] / preset["samples"]
    ids = [torch.tensor(prompt.ids) for prompt in prompts]

    def forward(i: int) -> None:
        with torch.inference_mode():
            target.model(input_ids=ids[i][None], use_cache=False)

    def once(flip: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the forward passes and of a calibration, taken in turns."""
        run = Calibration(target, bootstrap=preset["bootstrap"], spectra=len(prompts))
        bare = full = 0
        for i, prompt in enumerate(prompts):
            # An index below the limit of `spectra` asks for the prompt's spectra.
            index = i if int((i + 1) * share) > int(i * share) else len(prompts) + i
            if (i + flip) % 2:
                bare += timed(lambda i=i: forward(i))
            full += timed(lambda index=index, prompt=prompt: run.add(index, prompt))
            if not (i + flip) % 2:
                bare += timed(lambda i=i: forward(i))
        # A whole calibration closes once for all its prompts.
        return bare, full + timed(run.fingerprint) * len(prompts) / preset["samples"]

    forward(0)  # warm
    seconds = np.array([once(repeat) for repeat in range(repeats)])  # (repeats, bare or full, wall or processor)
    wall, processor = (seconds[:, 1] / seconds[:, 0]).T
    bare, full = np.median(seconds[..., 0], axis=0)
    tokens = sum(len(p.ids) for p in prompts)
    print(f"(a) {target.name}, {len(prompts)} ShareGPT prompts, {tokens:,} tokens, {target.dtype}, {torch.get_num_threads()} threads")
    print(f"    forward {bare:.2f} s ({tokens / bare:,.0f} tokens/s), calibration {full:.2f} s")
    print(f"    calibration / forward {spread(wall)}; goal at most 1.25; by processor time {spread(processor)}")


def bench_triples(repeats: int, sample: int) -> None:
    layers, block, hidden = 36, 32, 2560
    Z = torch.randn(layers, block, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grams = Z @ Z.mT
    triples = list(itertools.combinations(range(layers), 3))
    step = max(1, len(triples) // sample)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def singular_values() -> list[float]:
        found = []
        for triple in triples[::step]:
            p = torch.linalg.svdvals(torch.cat([Z[j] for j in triple], dim=1)).square()
            p /= p.sum()
            found.append(float(-(p * p.log()).sum()))
        return found

    all_set_entropies(grams, 2)
    expected = torch.tensor(singular_values(), dtype=torch.float64)
    error = float((all_set_entropies(grams, 3)[1][::step] - expected).abs().max())
    scale = len(triples) / len(triples[::step])
    seconds = np.array([(scale * timed(singular_values), timed(lambda: all_set_entropies(grams, 3))) for _ in range(repeats)])
    wall, processor = np.median(seconds[:, 1], axis=0)
    ratios = seconds[:, 0, 1] / seconds[:, 1, 1]
    torch.set_num_threads(threads)
    print(f"(b) all {len(triples):,} triples of {layers} layers, d = {hidden}, B = {block}, one thread")
    print(f"    Gram sums {processor:.2f} s of processor time, {wall:.2f} s of wall time; goal below 1")
    print(f"    singular values, timed on {len(triples[::step])} triples and scaled; greatest difference in entropy {error:.1e} nats")
    print(f"    singular values / Gram sums {spread(ratios)}, by processor time; goal at least 30")


def peak_memory(count: int) -> None:
    """Child process: calibrate a synthetic target over ``count`` prompts and print the peak in MiB."""
    layers, hidden, vocabulary, length = 30, 576, 4096, 512
    generator = torch.Generator().manual_seed(0)

    def run(ids):
        states = torch.randn(layers, length, hidden, generator=generator)
        return list(states), torch.randn(length, vocabulary, generator=generator)

    about = {"name": "synthetic", "dtype": "float32"}
    target = SimpleNamespace(run=run, describe=lambda: about, num_layers=layers, hidden_size=hidden)
    calibration = Calibration(target, spectra=8)
    for i in range(count):
        calibration.add(i, SimpleNamespace(key=str(i), ids=[0] * length))
    calibration.fingerprint()
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def bench_memory(count: int) -> None:
    """A synthetic target, so that the weights' own memory does not hide what grows. glibc is told to give freed memory back;
    left alone it keeps a heap whose holes add some 10 % in the course of a run."""
    peaks = []
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    for n in (count, 4 * count):
        command = [sys.executable, __file__, "--peak-memory", str(n)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        peaks.append(json.loads(done.stdout))
    print(f"(c) peak memory over {count} prompts {peaks[0]:.0f} MiB, over {4 * count} prompts {peaks[1]:.0f} MiB")
    print(f"    ratio: {peaks[1] / peaks[0]:.3f}; goal about 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices="abc", help="one of the three")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="target of (a)")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of (a), and the smaller number of (c): 20 or more")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of (a) and (b)")
    parser.add_argument("--svd-sample", type=int, default=60, help="triples whose singular values are timed in (b)")
    parser.add_argument("--threads", type=int, help="threads of (a); all cores unless given")
    parser.add_argument("--peak-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_memory:
        return peak_memory(options.peak_memory)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.only in (None, "a"):
        bench_calibration(options.target, options.prompts, options.repeats)
    if options.only in (None, "b"):
        bench_triples(options.repeats, options.svd_sample)
    if options.only in (None, "c"):
        bench_memory(options.prompts)


if __name__ == "__main__":
    main()
