"use strict";
(function (Elsi) {
  const ARRAYS = { F64: Float64Array, F32: Float32Array, I16: Int16Array };
  const NAMES = { F64: "torch.float64", F32: "torch.float32", I16: "torch.int16" };
  const LONGEST_HEADER = 100_000_000;

  const product = (shape) => shape.reduce((all, size) => all * size, 1);
  const isSize = (value) => Number.isSafeInteger(value) && value >= 0;

  /** Length of the JSON header, which the first eight bytes hold; `size` is that of the whole file. */
  function headerLength(bytes, size) {
    if (size < 8) throw new Elsi.Problem(`it has ${size} bytes, and a safetensors file begins with eight that hold a length`);
    const length = Number(new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true));
    if (length < 2 || length > LONGEST_HEADER) throw new Elsi.Problem("it does not begin like a safetensors file");
    if (8 + length > size) throw new Elsi.Problem(`it breaks off within its header: ${Elsi.count(8 + length)} bytes are announced, ${Elsi.count(size)} are there`);
    return length;
  }

  function header(bytes, length) {
    let parsed;
    try {
      parsed = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)));
    } catch {
      parsed = null;
    }
    if (parsed === null || typeof parsed !== "object" || Array.isArray(parsed)) {
      throw new Elsi.Problem("it does not begin like a safetensors file");
    }
    const { __metadata__: metadata = {}, ...entries } = parsed;
    return { metadata, entries };
  }

  /** {name: {dtype, shape, bytes, data}} of the tensors that lie after the header, which they must fill without a hole. */
  function tensors(entries, body) {
    const found = {};
    let end = 0;
    const inOrder = Object.entries(entries).sort(([, a], [, b]) => a?.data_offsets?.[0] - b?.data_offsets?.[0]);
    for (const [name, entry] of inOrder) {
      const { dtype, shape, data_offsets: offsets } = entry ?? {};
      const Kind = ARRAYS[dtype];
      if (!Kind) throw new Elsi.Problem(`its tensor ${name} has the unexpected type ${dtype}`);
      const whole = Array.isArray(shape) && shape.every(isSize) && Array.isArray(offsets) && offsets.length === 2 && offsets.every(isSize);
      const length = whole ? product(shape) * Kind.BYTES_PER_ELEMENT : 0;
      if (!whole || offsets[0] !== end || offsets[1] !== end + length) {
        throw new Elsi.Problem(`its header is damaged: the place of the tensor ${name} does not fit its shape`);
      }
      end += length;
      if (end > body.length) continue; // how much is missing is known only after the last
      const own = body.slice(offsets[0], offsets[1]); // a copy begins where its type may begin
      found[name] = { dtype: NAMES[dtype], shape, bytes: own, data: new Kind(own.buffer) };
    }
    if (end !== body.length) {
      const what = end > body.length ? "it is truncated" : "it has bytes that its header does not know";
      throw new Elsi.Problem(`${what}: ${Elsi.count(end)} bytes of tensors are announced, ${Elsi.count(body.length)} are there`);
    }
    return found;
  }

  Elsi.safetensors = {
    headerLength,
    header,
    /** Metadata and tensors of a whole file. */
    read(bytes) {
      const length = headerLength(bytes, bytes.length);
      const { metadata, entries } = header(bytes, length);
      return { metadata, tensors: () => tensors(entries, bytes.subarray(8 + length)) };
    },
  };
})(globalThis.Elsi);
