"use strict";
// Methods of elsi_lib.selection. What may take long is a generator that yields its progress, 0 to 1, and returns its result.
(function (Elsi) {
  const RULES = ["eagle2", "eagle3", "eagle3-code", "uniform", "last"];
  const FIXED = ["eagle2", "eagle3", "eagle3-code"];
  const EXHAUSTIVE_LIMIT = 1_000_000;
  const STABILITY_LIMIT = 3_000_000;

  const byNumber = (a, b) => a - b;

  function binomial(n, m) {
    let result = 1;
    for (let i = 1; i <= m; i++) result = (result * (n - m + i)) / i;
    return Math.round(result);
  }

  function checkSize(m, n) {
    if (!Number.isInteger(m) || m < 1 || m > n) throw new Elsi.Problem(`m = ${m} outside 1..${n}: there are ${n} layers to choose from`);
  }

  function checkLimit(name, value) {
    if (value !== null && !(Number.isInteger(value) && value >= 1)) throw new Elsi.Problem(`${name} = ${value}: at least 1, or "all" for no limit`);
  }

  function checkLayers(layers, n, of) {
    if (!layers.length) throw new Elsi.Problem(`an empty layer set for ${of}: name at least one layer of 0..${n - 1}`);
    if (layers.some((j) => !Number.isInteger(j) || j < 0 || j >= n)) throw new Elsi.Problem(`layer set ${Elsi.braces(layers)} outside 0..${n - 1} of ${of}`);
    if (new Set(layers).size !== layers.length) throw new Elsi.Problem(`layer set ${Elsi.braces(layers)} names a layer twice`);
    return [...layers].sort(byNumber);
  }

  /** Indices that sort `values` highest (or lowest) first; equals stay in order. */
  function order(values, lowest = false) {
    const sign = lowest ? 1 : -1;
    return Array.from(values, (_, i) => i).sort((i, j) => sign * (values[i] - values[j]) || i - j);
  }

  /** The `kBeam` sets of highest entropy, best first. */
  function* prune(entropies, sets, kBeam, progress) {
    const scores = new Float64Array(sets.length);
    for (let i = 0; i < sets.length; i++) {
      scores[i] = entropies.ofSet(sets[i]);
      yield progress(i / sets.length);
    }
    return order(scores).slice(0, kBeam ?? undefined).map((i) => ({ layers: sets[i], entropy: scores[i] }));
  }

  function lexicographic(a, b) {
    for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] - b[i];
    return 0;
  }

  function* beam(entropies, { m, kBeam, afterMidpoint, allowed }, propose) {
    const n = entropies.numLayers;
    checkSize(m, allowed.length);
    checkLimit("k_beam", kBeam);
    const late = afterMidpoint === "seeds" || (afterMidpoint === "singletons" && m === 1);
    const seeds = allowed.filter((j) => !late || j >= Math.floor(n / 2)).map((j) => [j]);
    if (!seeds.length) {
      throw new Elsi.Problem(`none of the layers (${allowed.join(", ")}) lies after the midpoint of ${n}: allow later ones, or after_midpoint = never`);
    }
    let frontier = yield* prune(entropies, seeds, kBeam, (share) => share / (2 * m - 1));
    for (let size = 2; size <= m; size++) {
      const extended = new Map();
      const done = 2 * size - 3;
      for (const [at, { layers }] of frontier.entries()) {
        const progress = (done + at / frontier.length) / (2 * m - 1);
        yield progress;
        for (const r of yield* propose(layers, progress)) {
          const joined = [...layers, r].sort(byNumber);
          extended.set(joined.join(), joined);
        }
      }
      if (!extended.size) throw new Elsi.Problem(`no set of ${size} of ${n} layers can be reached: raise k_pool or lower m = ${m}`);
      frontier = yield* prune(entropies, [...extended.values()].sort(lexicographic), kBeam, (share) => (done + 1 + share) / (2 * m - 1));
    }
    return frontier[0];
  }

  /** ELSI, algorithm 1 of the paper. */
  function elsi(entropies, options) {
    const { kExpand, allowed } = options;
    checkLimit("k_expand", kExpand);
    const joined = new Float64Array(entropies.grams[0].length);
    return beam(entropies, options, function* (layers, progress) {
      const candidates = allowed.filter((j) => !layers.includes(j));
      if (kExpand === null || candidates.length <= kExpand) return candidates;
      const base = entropies.sum(layers);
      const scores = new Float64Array(candidates.length);
      for (const [i, j] of candidates.entries()) {
        scores[i] = entropies.ofGram(entropies.addTo(base, j, joined));
        yield progress;
      }
      return order(scores).slice(0, kExpand).map((i) => candidates[i]);
    });
  }

  /** ELSI-C, algorithm 2: candidates by their conditional CKA transition. */
  function elsiC(entropies, options) {
    const { kPool, allowed, debiased } = options;
    checkLimit("k_pool", kPool);
    return beam(entropies, options, function* (layers) {
      const delta = Elsi.cka.transitions(Elsi.cka.conditional(entropies, layers, debiased));
      const ranked = order(delta).map((l) => l + 1);
      return ranked.filter((r) => allowed.includes(r) && !layers.includes(r)).slice(0, kPool ?? undefined);
    });
  }

  function* combinations(items, m) {
    const at = Array.from({ length: m }, (_, i) => i);
    for (;;) {
      yield at.map((i) => items[i]);
      let i = m - 1;
      while (i >= 0 && at[i] === items.length - m + i) i--;
      if (i < 0) return;
      at[i]++;
      for (let k = i + 1; k < m; k++) at[k] = at[k - 1] + 1;
    }
  }

  /** Entropy of every set of m of the allowed layers, in lexicographic order. */
  function* allSetEntropies(entropies, m, allowed) {
    const n = allowed.length;
    checkSize(m, n);
    const count = binomial(n, m);
    if (count > EXHAUSTIVE_LIMIT) {
      throw new Elsi.Problem(`${Elsi.count(count)} sets of ${m} of ${n} layers: too many to try one by one; use the method elsi with a wide beam`);
    }
    const found = new Float64Array(count);
    const sums = Array.from({ length: m }, () => new Float64Array(entropies.grams[0].length));
    let before = [];
    let at = 0;
    for (const layers of combinations(allowed, m)) {
      let same = 0;
      while (same < before.length && before[same] === layers[same]) same++;
      for (let i = same; i < m; i++) {
        if (i === 0) sums[0].set(entropies.grams[layers[0]]);
        else entropies.addTo(sums[i - 1], layers[i], sums[i]);
      }
      found[at++] = entropies.ofGram(sums[m - 1]);
      before = layers;
      yield at / count;
    }
    return found;
  }

  /** Place of a set in the lexicographic order of the sets of its size. */
  function setIndex(layers, allowed) {
    let index = 0;
    let next = 0;
    layers.forEach((layer, i) => {
      for (; allowed[next] !== layer; next++) index += binomial(allowed.length - next - 1, layers.length - i - 1);
      next++;
    });
    return index;
  }

  function setAt(index, allowed, m) {
    const layers = [];
    for (let next = 0; layers.length < m; next++) {
      const here = binomial(allowed.length - next - 1, m - layers.length - 1);
      if (index < here) layers.push(allowed[next]);
      else index -= here;
    }
    return layers;
  }

  function best(all, lowest) {
    let at = 0;
    for (let i = 1; i < all.length; i++) if (lowest ? all[i] < all[at] : all[i] > all[at]) at = i;
    return at;
  }

  function* exhaustive(entropies, { m, allowed, lowest }) {
    const all = yield* allSetEntropies(entropies, m, allowed);
    const at = best(all, lowest);
    return { layers: setAt(at, allowed, m), entropy: all[at] };
  }

  Elsi.selection = {
    RULES,
    FIXED,
    EXHAUSTIVE_LIMIT,
    STABILITY_LIMIT,
    binomial,
    checkLayers,
    allSetEntropies,
    range: (n) => Array.from({ length: n }, (_, j) => j),

    rule(name, n, m) {
      const half = Math.floor(n / 2);
      const fixed = { eagle2: [n - 1], eagle3: [2, half, n - 3], "eagle3-code": [1, half - 1, n - 4] }[name];
      if (fixed) {
        if (fixed[0] < 0 || fixed.some((j, i) => i > 0 && fixed[i - 1] >= j)) {
          throw new Elsi.Problem(`rule ${name} gives (${fixed.join(", ")}) on a target of ${n} layers: they collide; choose layers yourself`);
        }
        return fixed;
      }
      checkSize(m, n);
      if (name === "last") return Elsi.selection.range(n).slice(n - m);
      return Array.from({ length: m }, (_, i) => Math.floor(((2 * i + 1) * n) / (2 * m)));
    },

    /** Any method but those that need no entropies, as a generator of {layers, entropy}. */
    choose(entropies, method, options) {
      if (method === "elsi") return elsi(entropies, options);
      if (method === "elsi-c") return elsiC(entropies, options);
      return exhaustive(entropies, { ...options, lowest: method === "lowest" });
    },

    /** Where a set stands among all sets of its size: `all` from allSetEntropies. */
    standing(layers, all, allowed) {
      const own = all[setIndex(layers, allowed)];
      const at = best(all);
      let above = 0;
      for (const entropy of all) if (entropy > own) above++;
      return { rank: above + 1, sets: all.length, optimum: setAt(at, allowed, layers.length), best: all[at], regret: all[at] - own };
    },

    /** Repeat a selection on every bootstrap replicate; `chosen` is the set of the fingerprint itself. */
    *stability(fingerprint, chosen, method, options, reading) {
      const sets = [];
      for (let r = 0; r < fingerprint.replicates; r++) {
        const grams = Elsi.entropy.prepare(fingerprint.replicate(r), fingerprint.block, reading);
        const task = Elsi.selection.choose(new Elsi.Entropies(grams, fingerprint.block, reading.alpha), method, options);
        let step = task.next();
        for (; !step.done; step = task.next()) yield (r + step.value) / fingerprint.replicates;
        sets.push(step.value.layers);
      }
      const same = sets.filter((layers) => layers.join() === chosen.join()).length;
      const jaccard = sets.map((layers) => {
        const both = layers.filter((j) => chosen.includes(j)).length;
        return both / (layers.length + chosen.length - both);
      });
      return {
        share: same / sets.length,
        interval: Elsi.selection.wilson(same, sets.length),
        jaccard: jaccard.reduce((sum, value) => sum + value, 0) / sets.length,
        layerShare: Elsi.selection.range(fingerprint.numLayers).map((j) => sets.filter((layers) => layers.includes(j)).length / sets.length),
        replicates: sets.length,
      };
    },

    /** 95 % Wilson interval of k of n. */
    wilson(k, n) {
      const z = 1.959963984540054;
      const center = (2 * k + z * z) / (2 * (n + z * z));
      const delta = (z / (2 * (n + z * z))) * Math.sqrt((4 * k * (n - k)) / n + z * z);
      return [k === 0 ? 0 : center - delta, k === n ? 1 : center + delta];
    },
  };
})(globalThis.Elsi);
