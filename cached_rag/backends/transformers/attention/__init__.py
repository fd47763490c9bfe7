"""Attention of scattered, few and shared rows."""
