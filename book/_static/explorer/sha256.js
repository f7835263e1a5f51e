"use strict";
(function (Elsi) {
  // Fractional parts of the cube and square roots of the first primes (FIPS 180-4); crypto.subtle is missing on plain http pages.
  const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  /** First 32 bits of the fractional part of the k-th root, in integers: floats would lose the last bits. */
  const root = (prime, k) => {
    const wanted = BigInt(prime) << BigInt(32 * k);
    let low = 0n;
    for (let bit = 1n << 40n; bit; bit >>= 1n) if ((low + bit) ** BigInt(k) <= wanted) low += bit;
    return Number(low & 0xffffffffn) | 0;
  };
  const ROUND = Int32Array.from(primes, (p) => root(p, 3));
  const START = primes.slice(0, 8).map((p) => root(p, 2));

  /** SHA-256 over the pieces that were added. */
  Elsi.Sha256 = class Sha256 {
    constructor() {
      this._state = Int32Array.from(START);
      this._words = new Int32Array(64);
      this._block = new Uint8Array(64);
      this._length = 0;
    }

    add(bytes) {
      let at = 0;
      const held = this._length % 64;
      this._length += bytes.length;
      if (held) {
        at = Math.min(64 - held, bytes.length);
        this._block.set(bytes.subarray(0, at), held);
        if (held + at < 64) return this;
        this._compress(this._block, 0);
      }
      for (; at + 64 <= bytes.length; at += 64) this._compress(bytes, at);
      this._block.set(bytes.subarray(at));
      return this;
    }

    hex() {
      const bits = BigInt(this._length) * 8n;
      const padding = new Uint8Array(((119 - (this._length % 64)) % 64) + 9);
      padding[0] = 0x80;
      new DataView(padding.buffer).setBigUint64(padding.length - 8, bits);
      this.add(padding);
      return Array.from(this._state, (word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
    }

    _compress(bytes, at) {
      const w = this._words;
      for (let i = 0; i < 16; i++, at += 4) {
        w[i] = (bytes[at] << 24) | (bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3];
      }
      for (let i = 16; i < 64; i++) {
        const x = w[i - 15];
        const y = w[i - 2];
        const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
        const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
        w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
      }
      let [a, b, c, d, e, f, g, h] = this._state;
      for (let i = 0; i < 64; i++) {
        const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
        const t1 = (h + s1 + ((e & f) ^ (~e & g)) + ROUND[i] + w[i]) | 0;
        const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
        const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
        h = g;
        g = f;
        f = e;
        e = (d + t1) | 0;
        d = c;
        c = b;
        b = a;
        a = (t1 + t2) | 0;
      }
      [a, b, c, d, e, f, g, h].forEach((word, i) => {
        this._state[i] = (this._state[i] + word) | 0;
      });
    }
  };
})(globalThis.Elsi);
