"""Three methods that a stranger might add, each in one file, by the public interface alone."""
