"use strict";
(function (Elsi) {
  const PROMINENCE = 0.1; // share of the largest transition score, the default of elsi_lib.cka.find_boundaries

  /** U-centred: zero diagonal, rows that sum to zero. In place of a centred full matrix. */
  function uCentred(full, n) {
    for (let i = 0; i < n; i++) full[i * n + i] = 0;
    const rows = new Float64Array(n);
    let all = 0;
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) rows[i] += full[i * n + j];
      all += rows[i];
    }
    const mean = all / ((n - 1) * (n - 2));
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) full[i * n + j] = i === j ? 0 : full[i * n + j] - rows[i] / (n - 2) - rows[j] / (n - 2) + mean;
    }
    return full;
  }

  function dot(a, b) {
    let sum = 0;
    for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
    return sum;
  }

  /** N rows of N: linear CKA between all pairs of layers. */
  function matrix(grams, block, debiased) {
    const least = debiased ? 4 : 2;
    if (block < least) throw new Elsi.Problem(`CKA needs more rows than block = ${block}`);
    const flat = grams.map((packed) => {
      const full = Elsi.entropy.centredFull(packed, block);
      return debiased ? uCentred(full, block) : full;
    });
    const norm = flat.map((own, layer) => {
      const square = dot(own, own);
      const full = Elsi.entropy.toFull(grams[layer], block);
      if (square <= 1e-24 * dot(full, full)) throw new Elsi.Problem(`layer ${layer}: all rows are equal, so its CKA is undefined`);
      return Math.sqrt(square);
    });
    const M = grams.map(() => new Float64Array(grams.length).fill(1));
    for (let i = 0; i < grams.length; i++) {
      for (let j = 0; j < i; j++) M[i][j] = M[j][i] = dot(flat[i], flat[j]) / (norm[i] * norm[j]);
    }
    return M;
  }

  /** delta_l: how much the similarity profile changes from layer l to l + 1. */
  function transitions(M) {
    return M.slice(1).map((row, l) => row.reduce((sum, value, j) => sum + (value - M[l][j]) ** 2, 0));
  }

  /** Peaks whose prominence is at least `least`, as scipy.signal.find_peaks finds them; a plateau counts by its middle. */
  function findPeaks(score, least) {
    const peaks = [];
    for (let i = 1; i < score.length - 1; i++) {
      if (!(score[i - 1] < score[i])) continue;
      let end = i;
      while (end + 1 < score.length && score[end + 1] === score[i]) end++;
      if (end < score.length - 1 && score[end + 1] < score[i]) peaks.push((i + end) >> 1);
      i = end;
    }
    const lowest = (peak, step) => {
      let low = score[peak];
      for (let i = peak; i >= 0 && i < score.length && score[i] <= score[peak]; i += step) low = Math.min(low, score[i]);
      return low;
    };
    return peaks.filter((peak) => score[peak] - Math.max(lowest(peak, -1), lowest(peak, 1)) >= least);
  }

  Elsi.cka = {
    matrix,
    transitions,

    /** CKA between the set joined by layer i and the set joined by layer j. */
    conditional(entropies, layers, debiased) {
      const base = entropies.sum(layers);
      const joined = entropies.grams.map((own, j) => (layers.includes(j) ? base : entropies.addTo(base, j, new Float64Array(base.length))));
      return matrix(joined, entropies.block, debiased);
    },

    /** (first, last) layers of the runs between the large peaks of the transition score. */
    compartments(M) {
      const score = [0, ...transitions(M), 0];
      const top = Math.max(...score);
      const boundaries = top > 0 ? findPeaks(score, PROMINENCE * top).map((peak) => peak - 1) : [];
      const starts = [0, ...boundaries.map((b) => b + 1)];
      return starts.map((first, i) => [first, boundaries[i] ?? M.length - 1]);
    },

    /** Mean over the pairs of a set. */
    redundancy(M, layers) {
      let sum = 0;
      let pairs = 0;
      layers.forEach((i, at) => {
        for (const j of layers.slice(at + 1)) {
          sum += M[i][j];
          pairs++;
        }
      });
      return sum / pairs;
    },
  };
})(globalThis.Elsi);
