"use strict";
(function (Elsi) {
  /**
   * Eigenvalues of symmetric n x n matrices: Householder reduction to a tridiagonal matrix, then implicit QL, without vectors.
   * The memory is allocated once, because thousands of matrices of one size are asked for.
   */
  Elsi.Eigenvalues = class Eigenvalues {
    constructor(n) {
      this.n = n;
      this.values = new Float64Array(n);
      this._a = new Float64Array(n * n);
      this._off = new Float64Array(n + 1);
      this._p = new Float64Array(n);
    }

    /** Eigenvalues, unordered, of the matrix whose lower triangle `packed` holds row by row, times `scale`. Overwritten by the next call. */
    of(packed, scale = 1) {
      const { n, _a: a } = this;
      for (let i = 0, at = 0; i < n; i++) {
        for (let j = 0; j <= i; j++) a[i * n + j] = packed[at++] * scale;
      }
      this._tridiagonalise();
      this._ql();
      return this.values;
    }

    _tridiagonalise() {
      const { n, _a: a, _off: off, _p: p, values: d } = this;
      for (let i = n - 1; i > 0; i--) {
        const u = i * n;
        let rest = 0;
        for (let j = 0; j < i - 1; j++) rest += a[u + j] * a[u + j];
        const first = a[u + i - 1];
        d[i] = a[u + i];
        if (rest === 0) {
          off[i] = first;
          continue;
        }
        const norm = Math.sqrt(rest + first * first);
        const reflected = first > 0 ? -norm : norm;
        off[i] = reflected;
        a[u + i - 1] = first - reflected;
        const h = norm * norm - first * reflected; // |u|^2 / 2
        for (let j = 0; j < i; j++) {
          const row = j * n;
          const uj = a[u + j];
          let sum = 0;
          for (let k = 0; k < j; k++) {
            sum += a[row + k] * a[u + k];
            p[k] += a[row + k] * uj;
          }
          p[j] = sum + a[row + j] * uj;
        }
        let along = 0;
        for (let j = 0; j < i; j++) {
          p[j] /= h;
          along += a[u + j] * p[j];
        }
        along /= 2 * h;
        for (let j = 0; j < i; j++) p[j] -= along * a[u + j];
        for (let j = 0; j < i; j++) {
          const row = j * n;
          const uj = a[u + j];
          const pj = p[j];
          for (let k = 0; k <= j; k++) a[row + k] -= uj * p[k] + pj * a[u + k];
        }
      }
      d[0] = a[0];
    }

    _ql() {
      const { n, _off: e, values: d } = this;
      for (let i = 1; i < n; i++) e[i - 1] = e[i];
      e[n - 1] = 0;
      for (let l = 0; l < n; l++) {
        for (let round = 0; ; round++) {
          let m = l;
          for (; m < n - 1; m++) {
            if (Math.abs(e[m]) <= Number.EPSILON * (Math.abs(d[m]) + Math.abs(d[m + 1]))) break;
          }
          if (m === l) break;
          if (round === 60) throw new Elsi.Problem("the eigenvalues of a Gram matrix do not converge: the fingerprint is damaged");
          let g = (d[l + 1] - d[l]) / (2 * e[l]);
          let r = Math.sqrt(g * g + 1);
          g = d[m] - d[l] + e[l] / (g + (g < 0 ? -r : r));
          let s = 1;
          let c = 1;
          let p = 0;
          let i = m - 1;
          for (; i >= l; i--) {
            const f = s * e[i];
            const b = c * e[i];
            r = Math.sqrt(f * f + g * g);
            e[i + 1] = r;
            if (r === 0) {
              d[i + 1] -= p;
              e[m] = 0;
              break;
            }
            s = f / r;
            c = g / r;
            g = d[i + 1] - p;
            r = (d[i] - g) * s + 2 * c * b;
            p = s * r;
            d[i + 1] = g + p;
            g = c * r - b;
          }
          if (r === 0 && i >= l) continue;
          d[l] -= p;
          e[l] = g;
          e[m] = 0;
        }
      }
    }
  };
})(globalThis.Elsi);
