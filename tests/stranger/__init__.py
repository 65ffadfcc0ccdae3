"""Extensions that a stranger might write, each in one file, by the public interface alone."""
