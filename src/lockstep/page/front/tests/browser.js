// As much of a browser as modules ask for when they are read.
globalThis.matchMedia ??= () => ({ matches: false, addEventListener() {} });
