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
    "open_sink": (
        "Is the wave a sink? Above: matrix entropy along depth with all positions, without each prompt's first position, and "
        "over the "
        "rows of the representative that no state of outlying norm entered; bands are 1.96 standard deviations over bootstrap "
        "replicates of the prompts, where there are any. The grey line is log 2, the most that two directions can have. Below: the "
        "layers that ELSI chooses from each at m = 1, 2 and 3; rings mark the exhaustive optimum of three."
    ),
    "open_sink_spectrum": (
        "Where the sink sits. Top: share of the trace that the largest eigenvalue of each layer's Gram matrix holds. Middle: the "
        "largest weight of a single row of the representative in the eigenvector of that eigenvalue, circles: of row 0, into which "
        "first positions are averaged; the grey line is the weight of a row if all were equal. Bottom: norm of the first "
        "position's state over the median norm of the others."
    ),
    "open_sink_choices": (
        "What is chosen, and how alike layers are, with and without sinks. Rank: where the set that ELSI m=3 chooses from all "
        "positions "
        "stands among all sets of three under each row's view. Mean CKA is over all pairs of layers."
    ),
    "open_readings": (
        "What each open choice does, changed one at a time from the default reading (nats, uncentred, layers of their own "
        "norm, filter on, "
        "first position kept). From the left: matrix entropy of the set of ELSI m=3 over that of EAGLE-3, with 95 % intervals over "
        "bootstrap replicates of the prompts, mostly narrower than their marks; entropy of ELSI m=3; depth of the layer of "
        "ELSI m=1; "
        "distance to the reported values, whose parts the text defines. Lines: reported by the paper for its own targets, not "
        "measured "
        "here. Arrows: outside the axis."
    ),
    "open_readings_sets": (
        "Table 1 under each reading: layer sets of ELSI and ELSI-C, entropy of the sets of EAGLE-3 and of ELSI m=3, their "
        "ratio, depth of "
        "the layer of ELSI m=1 as a share of the last layer's, and rank of EAGLE-3's set among all sets of three."
    ),
    "open_readings_distances": (
        "Combinations of readings by their distance to the reported values, nearest first, with the parts of the distance; "
        "means over the "
        "targets measured here and those reported."
    ),
    "open_criteria": (
        "The set of three layers that each criterion likes best, as dots on the layer axis, one panel per target. S₁ is the "
        "paper's; "
        "coverage and dispersion are facility location and the smallest pairwise distance on 1 − CKA."
    ),
    "open_criteria_sets": (
        "The best set of three by each criterion, with its matrix entropy S₁ and the rank of that among all sets of three."
    ),
    "open_criteria_agreement": (
        "Spearman's rank correlation between criteria over all sets of three layers: above the diagonal the first target, below it "
        "the second."
    ),
    "open_criteria_tau": (
        "Rank correlation of each criterion with measured tau, over the trained sets of three layers (left) and over all "
        "trained sets "
        "(right; dispersion is undefined for single layers and leaves these out), largest tree, lowest temperature. p by "
        "permutation of the "
        "sets, not corrected; filled where below 0.05 after Holm's correction over the criteria. Bars: 95 % over questions, "
        "the same "
        "questions for all sets; they do not cover the choice of sets or the noise of training."
    ),
    "open_submodularity": (
        "Above: share of cases in which each objective is not submodular (a layer adds more to a larger set; filled) or not "
        "monotone "
        "(a layer takes away; hatched), sets of up to five layers. Below: regret of the best set that beams of growing width "
        "find, against "
        "the optimum of all sets of the size."
    ),
    "open_submodularity_searches": (
        "Sets found by greedy search and by a beam of ten, each set extended by every layer, beside the optimum of all sets of "
        "that size."
    ),
    "open_submodularity_guarantees": (
        "Matrix entropy of layers of equal trace that the bound of 1 − 1/e guarantees greedy search, what it reaches, and the "
        "best there is."
    ),
    "open_stability": (
        "How many prompts a choice needs. Above: Jaccard similarity of the sets of three that ELSI chooses from disjoint samples of "
        "prompts to the set it chooses from all of them, mean and 95 % interval over samples where there are at least five; grey "
        "numbers count the samples. Below: their regret on all prompts, mean (solid) and largest (dotted). Dashed: as many prompts as "
        "the paper's calibration has."
    ),
    "open_parameters": (
        "Sets of three under other values of one parameter at a time. Blue: the set of the default, which the grey rows show; orange: "
        "another set, the paler the more it shares. K_pool is ELSI-C's, the others are ELSI's."
    ),
    "open_profiles": (
        "Matrix entropy along depth on eight kinds of text, each put to the target in the same way and cut at the same length, with "
        "each prompt's first position kept (above) and dropped (below). Black: conversations, and a second sample of them (dotted). "
        "Bands: 95 %, by leaving out each prompt."
    ),
    "open_transfer": (
        "Layers chosen on one kind of text, judged on another: regret of ELSI's set of three, in thousandths of a nat below the best "
        "set there, first position kept. 0 on the diagonal where the beam finds the best set."
    ),
    "open_transfer_sets": (
        "Sets of three that ELSI chooses on each kind of text, the share of its prompts without which the choice is the same, and "
        "where they stand among all sets on conversations, with 95 % by leaving out each conversation."
    ),
}

_TAU_TABLES = {
    "": (
        "tau, the mean number of tokens that one target step yields, by method, nodes of the draft tree and temperature: tokens "
        "over steps, pooled over all questions, with 95 % intervals from a bootstrap over questions. Loss is the mean "
        "cross-entropy of the last tenth of the reported batches, the same for all drafts. The paper's values are for its "
        "own target, {paper}, stand apart and are labelled as reported."
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
        "Live decoding on the machine that the passport names, batch 1, against the target alone on the same sampled questions; the "
        "tree of 8 nodes is two levels deep and four wide. "
        "Speed-up: mean over questions of tokens per second, over the target's own mean; mean of ratios: of the questions' own "
        "ratios. 95 % intervals over questions. An answer's first token comes with its prompt's pass and counts for the speed, not "
        "for tau."
    ),
}
for _table, _paper in (("table2", "Qwen3-4B"), ("table3", "Llama-3.1-8B")):
    CAPTIONS |= {f"{_table}{part}": text.format(paper=_paper) for part, text in _TAU_TABLES.items()}
