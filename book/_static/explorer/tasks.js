"use strict";
(function (Elsi) {
  const SLICE = 12; // milliseconds of work between two chances for the page to answer and draw

  /** Runs a generator in slices. Gives {result, stop}: a promise of what it returns, and an end to it, after which the promise stays open. */
  Elsi.runInSlices = function (task, progress) {
    let timer;
    const result = new Promise((resolve, reject) => {
      const slice = () => {
        const end = performance.now() + SLICE;
        try {
          let step = task.next();
          while (!step.done && performance.now() < end) step = task.next();
          if (step.done) {
            resolve(step.value);
          } else {
            progress(step.value);
            timer = setTimeout(slice);
          }
        } catch (error) {
          reject(error);
        }
      };
      timer = setTimeout(slice);
    });
    return { result, stop: () => clearTimeout(timer) };
  };
})(globalThis.Elsi);
