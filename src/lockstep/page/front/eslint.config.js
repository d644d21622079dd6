// What `npm run lint` looks for: mistakes, and functions that nobody can follow.
import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    files: ["src/**/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.browser },
    rules: {
      complexity: ["error", 20],
      "max-params": ["error", 6],
      eqeqeq: "error",
      "no-var": "error",
      "prefer-const": ["error", { destructuring: "all" }],
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      "no-shadow": "error",
      "no-implicit-globals": "error",
      // The page makes no HTML of any text, see html.py.
      "no-restricted-properties": [
        "error",
        { property: "innerHTML" },
        { property: "outerHTML" },
        { property: "insertAdjacentHTML" },
        { object: "document", property: "write" },
      ],
      "no-eval": "error",
      "no-new-func": "error",
      "no-console": "error",
    },
  },
  {
    files: ["*.js", "*.mjs", "tests/**/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.node },
  },
];
