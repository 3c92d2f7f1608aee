"""What the report says of single engines and of classes of them: when they were there, what each class added."""
