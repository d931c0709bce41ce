"""One file, one task: examples, the prompt, and the verifier that scores a completion."""
