"""Codecs: how a kept token is stored."""
