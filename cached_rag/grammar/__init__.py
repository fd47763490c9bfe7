"""The form of answers: grammars that an answer keeps to, tools, and how models call them."""
