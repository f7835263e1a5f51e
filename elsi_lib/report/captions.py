"""Captions of the figures and tables: what is drawn, never what came out.

They stand in the notebooks' cells for the book and in the passports; a test keeps the two equal.
"""

CAPTIONS = {
    "figure1": (
        "Matrix entropy of single prompts along depth, no token filter: one thin line per prompt, the median prompt, and the "
        "band that holds 80 % of the prompts. Left: raw token states of a window at the prompt's start. Right: block "
        "averages, the prompt's own representative. Dashed: the median when each prompt's first position is dropped."
    ),
    "figure2": (
        "The activation wave: matrix entropy of each layer's representative, token filter on, one column per target. Band: "
        "1.96 standard deviations over bootstrap replicates of the prompts. Dashed: the same with the first position of each "
        "prompt dropped. Dotted: over the rows that no state of outlying norm entered. Below: the norm of the first "
        "position's state over the median norm of the others. Reported by the paper for its own targets: a peak at layer 28 "
        "of 36 (Qwen3-4B) and near layer 27 of 32 (Llama-3.1-8B)."
    ),
    "figure3": (
        "Matrix entropy of layer pairs: the ten layers of highest entropy as seeds (rows, highest on top), each paired with "
        "every other layer (columns). The box marks the best of these pairs; grey cells would pair a layer with itself."
    ),
    "figure4": (
        "What the token filter does to single prompts. Left: mean and one standard deviation of their matrix entropy along "
        "depth. Right: change of the variance between prompts by third of depth, against all positions, with 95 % intervals "
        "from a paired bootstrap over prompts, on an axis of log ratios; arrows leave the axis. Equally many random "
        "positions are a control; they keep the first position in another share of the prompts than the filter does. Hollow: "
        "first position of each prompt dropped. Stars: reported by the paper for Qwen3-4B, not measured here."
    ),
    "figure5": (
        "Linear CKA between all pairs of layers, token filter on, with compartment boundaries in yellow, one column per "
        "target. Plain (biased) and debiased estimator, named above each panel with its compartments; the debiased one can "
        "be negative."
    ),
    "figure6": (
        "Linear CKA (plain estimator) with and without the token filter, one column per target; boundaries in yellow from "
        "the same detector at the same settings. The compartments are listed above each panel."
    ),
    "figure7": (
        "The beam frontier of ELSI: the ten best sets at sizes 1, 2 and 3, best on top, as dots on the layer axis (left) "
        "with their matrix entropies (right). Rings mark the true optimum found by exhaustive search; regret is how far the "
        "beam's best stays below it."
    ),
    "table1": (
        "Layer sets by method. Rank and regret are among all sets of the same size; first dropped is the rank when each "
        "prompt's first position is left out; same set is the share of bootstrap replicates over prompts that choose the "
        "same set; mean CKA is over the set's pairs. The paper's values for its own targets stand apart and are labelled as "
        "reported."
    ),
    "tau_differences": (
        "Paired differences in tau to EAGLE-3 on the same questions, pooled over all steps, with 95 % intervals from a bootstrap "
        "over questions; one panel per tree size and temperature. Filled: the interval leaves out zero, p after Holm's correction "
        "is below 0.05, and the difference exceeds the noise of training. Hollow: not decided. EAGLE-3 again: the same layers "
        "trained from other initial weights; the grey band is as wide as the largest such difference of any panel. Arrows: "
        "outside the axis."
    ),
    "tau_entropy": (
        "Matrix entropy of each layer set against the tau of the draft trained on it, with 95 % intervals over questions; one "
        "panel per tree size and temperature, with Spearman's rank correlation over the sets. Marker size: one, two or three "
        "layers. The sets were not drawn at random."
    ),
    "tau_training": (
        "Learning curves of all drafts, means over seven reported batches. Left: cross-entropy against the target's distribution at "
        "step 0 of the training-time test, "
        "on batches not yet learned from. Middle: share of rows whose likeliest token is the target's. Right: that share by step "
        "over the last tenth of training."
    ),
    "tau_categories": (
        "tau by category of question, pooled within each, with 95 % intervals over questions (left), and the gain of ELSI m=3 over "
        "EAGLE-3 there in percent (right), filled where its interval, not corrected for the number of categories, leaves out zero. "
        "Hatched, where shown: reported by the paper for Qwen3-4B by task, not measured here."
    ),
}

_TAU_TABLES = {
    "": (
        "tau, the mean number of tokens that one target step yields, by method, nodes of the draft tree and temperature: tokens "
        "over steps, pooled over all questions, with 95 % intervals from a bootstrap over questions. Loss is the mean "
        "cross-entropy over the last tenth of training. The paper's values are for its own target, {paper}, stand apart and are "
        "labelled as reported."
    ),
    "_differences": (
        "Paired differences in tau to EAGLE-3 with 95 % intervals over questions, p from a permutation test within questions, and "
        "Holm's correction over the distinct drafts of one setting. Detectable: the true difference found with 80 % probability "
        "at 5 %. A difference counts as decided only where it also exceeds that between two trainings of EAGLE-3's set. Gains "
        "reported by the paper for {paper} stand below, labelled as reported."
    ),
    "_categories": (
        "tau by category of question and method, pooled over the steps of each category; overall and for the two-turn categories "
        "also as the mean over categories."
    ),
    "_speed": (
        "Live decoding on the machine that the passport names, batch 1, against the target alone on the same sampled questions. "
        "Speed-up: mean over questions of tokens per second, over the target's own mean; mean of ratios: of the questions' own "
        "ratios. 95 % intervals over questions."
    ),
}
for _table, _paper in (("table2", "Qwen3-4B"), ("table3", "Llama-3.1-8B")):
    CAPTIONS |= {f"{_table}{part}": text.format(paper=_paper) for part, text in _TAU_TABLES.items()}
