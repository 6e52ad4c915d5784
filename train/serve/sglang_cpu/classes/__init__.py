"""What SGLang is told to import instead of its 200 model files; it looks at each module here."""
