"use strict";
(function (Elsi) {
  const { triangle } = Elsi.fingerprint;
  const ROUNDING = 1e-14; // relative; as in elsi_lib.entropy

  function trace(packed, block) {
    let sum = 0;
    for (let i = 0; i < block; i++) sum += packed[triangle(i) + i];
    return sum;
  }

  /** H K H, H = I - 11^T / B, as a full matrix. */
  function centredFull(packed, block) {
    const full = Elsi.entropy.toFull(packed, block);
    for (let i = 0; i < block; i++) {
      let mean = 0;
      for (let j = 0; j < block; j++) mean += full[i * block + j];
      mean /= block;
      for (let j = 0; j < block; j++) full[i * block + j] -= mean;
    }
    const means = new Float64Array(block);
    for (let i = 0; i < block; i++) for (let j = 0; j < block; j++) means[j] += full[i * block + j];
    for (let i = 0; i < block; i++) for (let j = 0; j < block; j++) full[i * block + j] -= means[j] / block;
    return full;
  }

  function ofSpectrum(spectrum, alpha) {
    let largest = -Infinity;
    for (const value of spectrum) if (value > largest) largest = value;
    if (!(largest > 0)) throw new Elsi.Problem("all states are zero: their entropy is undefined");
    const cut = ROUNDING * largest;
    let total = 0;
    for (const value of spectrum) if (value > cut) total += value;
    const top = largest / total;
    if (alpha === Infinity) return -Math.log(top);
    let sum = 0;
    for (const value of spectrum) {
      if (!(value > cut)) continue;
      const p = value / total;
      if (alpha === 1) sum -= p * Math.log(p);
      else if (alpha > 2) sum += (p / top) ** alpha; // scaled, so that p^alpha cannot underflow to nothing
      else sum += p * Math.expm1((alpha - 1) * Math.log(p)); // keeps its digits when alpha is next to 1
    }
    if (alpha === 1) return sum;
    return (alpha > 2 ? alpha * Math.log(top) + Math.log(sum) : Math.log1p(sum)) / (1 - alpha);
  }

  Elsi.entropy = {
    trace,
    centredFull,

    toFull(packed, block) {
      const full = new Float64Array(block * block);
      for (let i = 0, at = 0; i < block; i++) {
        for (let j = 0; j <= i; j++, at++) full[i * block + j] = full[j * block + i] = packed[at];
      }
      return full;
    },

    /** Gram matrices under another reading: rows centred, every layer of trace 1. */
    prepare(grams, block, { center, normalize }) {
      let prepared = grams;
      if (center) {
        prepared = prepared.map((packed, layer) => {
          const full = centredFull(packed, block);
          const centred = new Float64Array(packed.length);
          for (let i = 0, at = 0; i < block; i++) for (let j = 0; j <= i; j++) centred[at++] = full[i * block + j];
          if (trace(centred, block) <= ROUNDING * trace(packed, block)) {
            throw new Elsi.Problem(`layer ${layer}: all rows are equal, so nothing is left when they are centred`);
          }
          return centred;
        });
      }
      if (normalize === "trace") {
        prepared = prepared.map((packed, layer) => {
          const own = trace(packed, block);
          if (own <= 0) throw new Elsi.Problem(`layer ${layer} has zero trace and cannot be normalised`);
          return packed.map((value) => value / own);
        });
      }
      return prepared;
    },
  };

  /** S_alpha of the sets of some layers, in nats: a function of sums of their Gram matrices. */
  Elsi.Entropies = class Entropies {
    constructor(grams, block, alpha) {
      if (!(alpha > 0)) throw new Elsi.Problem(`alpha = ${alpha}: the order of the entropy is above 0 (1 is Shannon, inf the min-entropy)`);
      this.grams = grams;
      this.block = block;
      this.alpha = alpha;
      this._eigenvalues = new Elsi.Eigenvalues(block);
    }

    get numLayers() {
      return this.grams.length;
    }

    ofGram(packed) {
      const own = trace(packed, this.block);
      if (!(own > 0)) throw new Elsi.Problem("all states are zero: their entropy is undefined");
      return ofSpectrum(this._eigenvalues.of(packed, 1 / own), this.alpha);
    }

    sum(layers) {
      const total = this.grams[layers[0]].slice();
      for (let i = 1; i < layers.length; i++) this.addTo(total, layers[i], total);
      return total;
    }

    /** into = packed + K_layer. */
    addTo(packed, layer, into) {
      const own = this.grams[layer];
      for (let i = 0; i < own.length; i++) into[i] = packed[i] + own[i];
      return into;
    }

    ofSet(layers) {
      return this.ofGram(this.sum(layers));
    }
  };
})(globalThis.Elsi);
