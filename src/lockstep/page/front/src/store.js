// What a person has chosen, kept for the next page. A browser may forbid that: then it is forgotten.

/** @param {string} name */
export function remembered(name) {
  try {
    return localStorage.getItem(`lockstep-${name}`);
  } catch {
    return null;
  }
}

/**
 * @param {string} name
 * @param {string} value
 */
export function remember(name, value) {
  try {
    localStorage.setItem(`lockstep-${name}`, value);
  } catch {
    // Chosen for this page alone.
  }
}
