"""A taskset of verifiers: products of two numbers, and a tool over MCP that multiplies."""

from product_tool.taskset import ProductTaskset

__all__ = ['ProductTaskset']
