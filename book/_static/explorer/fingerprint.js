"use strict";
(function (Elsi) {
  const FORMAT = "elsi-fingerprint-1";
  const VARIANTS = [[true, true], [true, false], [false, true], [false, false]]; // (filtered, first position kept)
  const AGAIN = "make it again with `elsi calibrate TARGET -o FILE`";
  const MAKE = "choose a file that `elsi calibrate TARGET -o FILE` wrote";

  const triangle = (n) => (n * (n + 1)) / 2;

  /** Upper triangle row by row, as in the file, to lower triangle row by row. */
  function toLower(upper, block) {
    const lower = new Float64Array(upper.length);
    for (let i = 0, at = 0; i < block; i++) {
      for (let j = i; j < block; j++) lower[triangle(j) + i] = upper[at++];
    }
    return lower;
  }

  function checkFormat(metadata) {
    const format = metadata?.format;
    if (format !== FORMAT) {
      throw new Elsi.Problem(`it is not a fingerprint (format ${format === undefined ? "none" : `"${format}"`}, expected "${FORMAT}")`);
    }
  }

  function readPassport(text) {
    try {
      const passport = JSON.parse(text);
      const { target, parameters, prompts } = passport;
      if (typeof target.name === "string" && Number.isInteger(parameters.block) && typeof prompts === "object") return passport;
    } catch {
      // said below
    }
    throw new Elsi.Problem("it has no readable passport: it is damaged");
  }

  function contentHash(passportText, tensors) {
    const utf8 = new TextEncoder();
    const digest = new Elsi.Sha256().add(utf8.encode(passportText));
    for (const name of Object.keys(tensors).sort()) {
      const { dtype, shape, bytes } = tensors[name];
      const tuple = shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`;
      digest.add(utf8.encode(`${name} ${dtype} ${tuple}`)).add(bytes);
    }
    return digest.hex();
  }

  function checkShapes(tensors, block) {
    const want = (name, dtype, shape) => {
      const tensor = tensors[name];
      if (!tensor) throw new Elsi.Problem(`its tensor ${name} is missing`);
      const fits = tensor.shape.length === shape.length && shape.every((size, i) => size === null || size === tensor.shape[i]);
      if (!fits || tensor.dtype !== `torch.${dtype}`) {
        const expected = shape.map((size) => size ?? "any").join(" x ");
        throw new Elsi.Problem(`its tensor ${name} is ${tensor.dtype} of ${tensor.shape.join(" x ")}, expected torch.${dtype} of ${expected}`);
      }
      if (!tensor.data.every(Number.isFinite)) throw new Elsi.Problem(`its tensor ${name} holds NaN or infinity`);
      return tensor.shape;
    };
    const [, layers] = want("grams", "float64", [VARIANTS.length, null, triangle(block)]);
    if (!layers || !block) throw new Elsi.Problem("it holds no layers");
    if ("bootstrap" in tensors) {
      const [replicates] = want("bootstrap", "int16", [null, layers, triangle(block)]);
      want("bootstrap_step", "float32", [replicates, layers]);
    }
  }

  /** A target's Gram matrices as elsi_lib.fingerprint.Fingerprint holds them; a matrix is its lower triangle, row by row. */
  class Fingerprint {
    constructor(tensors, passport, sha256) {
      this._tensors = tensors;
      this.passport = passport;
      this.sha256 = sha256;
      this.target = passport.target.name;
      this.block = passport.parameters.block;
      this.numLayers = tensors.grams.shape[1];
      this.replicates = "bootstrap" in tensors ? tensors.bootstrap.shape[0] : 0;
    }

    /** K_j of every layer: filtered or not, first position kept or dropped. */
    grams(filtered, sink) {
      const variant = VARIANTS.findIndex(([f, s]) => f === filtered && s === sink);
      return Array.from({ length: this.numLayers }, (_, j) => this._gram("grams", variant, j));
    }

    /** K_j of every layer in bootstrap replicate r of the default variant: 16-bit differences in units of sqrt(K_ii K_jj). */
    replicate(r) {
      const { block } = this;
      return this.grams(true, true).map((gram, layer) => {
        const step = this._tensors.bootstrap_step.data[r * this.numLayers + layer];
        const change = this._gram("bootstrap", r, layer);
        const scale = Float64Array.from({ length: block }, (_, i) => Math.max(Math.sqrt(gram[triangle(i) + i]), 1e-300));
        for (let i = 0, at = 0; i < block; i++) {
          for (let j = 0; j <= i; j++, at++) gram[at] += change[at] * step * (scale[i] * scale[j]);
        }
        return gram;
      });
    }

    _gram(name, first, layer) {
      const size = triangle(this.block);
      const from = (first * this.numLayers + layer) * size;
      return toLower(this._tensors[name].data.subarray(from, from + size), this.block);
    }
  }

  Elsi.fingerprint = {
    MAKE,
    triangle,
    checkFormat,

    /** The fingerprint in `bytes`, or a Problem that names the file, what is wrong with it, and the way out. */
    parse(bytes, name) {
      let own = false;
      try {
        const { metadata, tensors: read } = Elsi.safetensors.read(bytes);
        checkFormat(metadata);
        own = true;
        const tensors = read();
        const passport = readPassport(metadata.passport);
        checkShapes(tensors, passport.parameters.block);
        const sha256 = contentHash(metadata.passport, tensors);
        if (sha256 !== metadata.sha256) throw new Elsi.Problem("it was edited after it was written: its content does not match its hash");
        return new Fingerprint(tensors, passport, sha256);
      } catch (error) {
        if (!(error instanceof Elsi.Problem)) throw error;
        throw new Elsi.Problem(`${name} cannot be shown: ${error.message}; ${own ? AGAIN : MAKE}`);
      }
    },

    /** Read a File of the reader's; of a large one that is no fingerprint only the beginning is read. */
    async open(file) {
      const bytes = async (end) => new Uint8Array(await file.slice(0, end).arrayBuffer());
      try {
        const length = Elsi.safetensors.headerLength(await bytes(8), file.size);
        checkFormat(Elsi.safetensors.header(await bytes(8 + length), length).metadata);
      } catch (error) {
        if (!(error instanceof Elsi.Problem)) throw error;
        throw new Elsi.Problem(`${file.name} cannot be shown: ${error.message}; ${MAKE}`);
      }
      return this.parse(await bytes(file.size), file.name);
    },
  };
})(globalThis.Elsi);
