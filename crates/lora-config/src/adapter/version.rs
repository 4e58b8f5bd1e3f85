//! `peft_version`: decides the layout of stacked experts where shapes do not.

use super::fields::Fields;
use crate::ConfigFinding;
use crate::json::Json;
use std::cmp::Ordering;
use std::fmt;

/// A PEFT version, `x.y.z` with a mark for builds before that release (`0.19.1.dev0@<commit>`), which order below it: what such a
/// build writes may be either neighbour's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeftVersion {
    /// `x` of `x.y.z`.
    pub major: u32,
    /// `y`.
    pub minor: u32,
    /// `z`.
    pub patch: u32,
    /// A development build, alpha, beta or candidate of `x.y.z`.
    pub pre_release: bool,
}

impl PeftVersion {
    /// The release `major.minor.patch`.
    pub const fn release(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
            pre_release: false,
        }
    }

    /// Reads `x.y`, `x.y.z` and what Python allows behind them.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.split(['@', '+']).next()?.trim();
        let (major, rest) = number(text)?;
        let (minor, rest) = number(rest.strip_prefix('.')?)?;
        let (patch, rest) = match rest.strip_prefix('.').and_then(number) {
            Some(found) => found,
            None => (0, rest),
        };
        // A post-release is not before its release.
        let pre_release = !(rest.is_empty() || rest.starts_with(".post"));
        Some(Self {
            major,
            minor,
            patch,
            pre_release,
        })
    }
}

/// A decimal number at the start of `text`, and what follows it.
fn number(text: &str) -> Option<(u32, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    Some((text[..digits].parse().ok()?, &text[digits..]))
}

impl Ord for PeftVersion {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |v: &Self| (v.major, v.minor, v.patch, !v.pre_release);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for PeftVersion {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for PeftVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)?;
        f.write_str(if self.pre_release { ".dev0" } else { "" })
    }
}

/// `peft_version`. One that cannot be read is as good as absent, with a warning: only stacked experts need it, and
/// they are refused without.
pub(crate) fn read(fields: &mut Fields<'_>) -> Option<PeftVersion> {
    let value = fields.given("peft_version")?;
    let version = match value {
        Json::Text(text) => PeftVersion::parse(text),
        _ => None,
    };
    if version.is_none() {
        fields.warnings.push(ConfigFinding::warn(
            "peft-version-unknown",
            format!("peft_version is {value}, which is no version number; taken as absent"),
        ));
    }
    version
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn development_builds_come_before_their_release() {
        let dev = PeftVersion::parse("0.19.1.dev0@UNKNOWN").unwrap();
        assert!(dev.pre_release);
        assert!(PeftVersion::release(0, 19, 0) < dev && dev < PeftVersion::release(0, 19, 1));
    }

    #[test]
    fn releases_in_every_spelling() {
        let release = PeftVersion::release(0, 18, 0);
        for text in ["0.18.0", "0.18", " 0.18.0 ", "0.18.0.post1", "0.18.0+cu130"] {
            assert_eq!(PeftVersion::parse(text), Some(release), "{text}");
        }
        assert!(PeftVersion::parse("0.18.0rc1").unwrap() < release);
        assert!(PeftVersion::parse("0.18.dev0").unwrap() < release);
    }

    #[test]
    fn what_is_no_version_is_none() {
        for text in [
            "",
            "main",
            "1",
            "v0.18.0",
            "0..1",
            "99999999999.0.0",
            "0.-1.0",
        ] {
            assert_eq!(PeftVersion::parse(text), None, "{text}");
        }
    }
}
