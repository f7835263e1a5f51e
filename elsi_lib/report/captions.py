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
}
