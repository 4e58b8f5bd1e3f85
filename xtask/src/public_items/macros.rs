//! Expands the `macro_rules!` that write public items, so that a list read from sources misses none of them.
//!
//! Macros of one arm whose repetitions are `$(...)*`; anything else is an error rather than items that nobody lists.

use anyhow::{Context, Result, bail};
use proc_macro2::{Group, TokenStream, TokenTree};
use std::collections::HashMap;
use syn::parse::discouraged::Speculative;
use syn::parse::{Parse, ParseStream, Parser};

/// The arm of a macro.
pub(super) struct Rules {
    matcher: Vec<Part>,
    body: Vec<Part>,
}

impl Rules {
    /// The rules of `macro_rules! name { (matcher) => { body } }`, from what stands between the outer braces.
    pub(super) fn parse(name: &str, rules: &TokenStream) -> Result<Self> {
        let trees: Vec<TokenTree> = rules.clone().into_iter().collect();
        match trees.as_slice() {
            [TokenTree::Group(matcher), _, _, TokenTree::Group(body)]
            | [TokenTree::Group(matcher), _, _, TokenTree::Group(body), _] => Ok(Self {
                matcher: parts(matcher.stream(), true),
                body: parts(body.stream(), false),
            }),
            _ => bail!("macro {name} writes items and has several arms: write the items out"),
        }
    }

    /// What `name!(input)` stands for.
    pub(super) fn expand(&self, name: &str, input: &TokenStream) -> Result<TokenStream> {
        let bound = (|input: ParseStream<'_>| matched(&self.matcher, input))
            .parse2(input.clone())
            .with_context(|| format!("the input of macro {name}"))?;
        transcribed(&self.body, &bound).with_context(|| format!("the body of macro {name}"))
    }
}

/// One part of a matcher or of a body.
enum Part {
    /// `$name`; in a matcher with the kind behind it.
    Name(String, String),
    /// `$(...)*`.
    Repetition(Vec<Part>),
    Group(Group, Vec<Part>),
    Plain(TokenTree),
}

fn parts(stream: TokenStream, is_matcher: bool) -> Vec<Part> {
    let mut trees = stream.into_iter();
    let mut parts_found = Vec::new();
    while let Some(tree) = trees.next() {
        parts_found.push(match tree {
            TokenTree::Punct(p) if p.as_char() == '$' => match trees.next() {
                Some(TokenTree::Group(group)) => {
                    trees.next(); // `*`
                    Part::Repetition(parts(group.stream(), is_matcher))
                }
                name => {
                    let name = name.map(|n| n.to_string()).unwrap_or_default();
                    let kind = is_matcher.then(|| trees.nth(1)).flatten(); // past `:`
                    Part::Name(name, kind.map(|k| k.to_string()).unwrap_or_default())
                }
            },
            TokenTree::Group(group) => {
                let inner = parts(group.stream(), is_matcher);
                Part::Group(group, inner)
            }
            other => Part::Plain(other),
        });
    }
    parts_found
}

/// What the names of a matcher stand for: once, and in each round of a repetition.
#[derive(Default)]
struct Bound {
    once: HashMap<String, TokenStream>,
    rounds: Vec<Vec<Bound>>,
}

fn matched(matcher: &[Part], input: ParseStream<'_>) -> syn::Result<Bound> {
    let mut bound = Bound::default();
    for part in matcher {
        match part {
            Part::Name(name, kind) => {
                bound.once.insert(name.clone(), fragment(kind, input)?);
            }
            Part::Repetition(inner) => {
                let mut rounds = Vec::new();
                while !input.is_empty() {
                    let ahead = input.fork();
                    let Ok(round) = matched(inner, &ahead) else {
                        break;
                    };
                    input.advance_to(&ahead);
                    rounds.push(round);
                }
                bound.rounds.push(rounds);
            }
            Part::Group(_, inner) => {
                let found: Group = input.parse()?;
                let found =
                    (|input: ParseStream<'_>| matched(inner, input)).parse2(found.stream())?;
                bound.once.extend(found.once);
                bound.rounds.extend(found.rounds);
            }
            Part::Plain(wanted) => {
                let found: TokenTree = input.parse()?;
                if found.to_string() != wanted.to_string() {
                    return Err(syn::Error::new(found.span(), format!("not `{wanted}`")));
                }
            }
        }
    }
    Ok(bound)
}

/// The tokens of the next fragment of a kind.
fn fragment(kind: &str, input: ParseStream<'_>) -> syn::Result<TokenStream> {
    let ahead = input.fork();
    match kind {
        "ident" => drop(<syn::Ident as syn::ext::IdentExt>::parse_any(&ahead)?),
        "ty" => drop(syn::Type::parse(&ahead)?),
        "meta" => drop(syn::Meta::parse(&ahead)?),
        "path" => drop(syn::Path::parse(&ahead)?),
        "expr" => drop(syn::Expr::parse(&ahead)?),
        "literal" => drop(syn::Lit::parse(&ahead)?),
        "tt" => drop(TokenTree::parse(&ahead)?),
        other => return Err(input.error(format!("fragments of kind `{other}` are not read"))),
    }
    let mut tokens = TokenStream::new();
    while input.cursor() < ahead.cursor() {
        tokens.extend([TokenTree::parse(input)?]);
    }
    Ok(tokens)
}

fn transcribed(body: &[Part], bound: &Bound) -> Result<TokenStream> {
    let mut tokens = TokenStream::new();
    for part in body {
        match part {
            Part::Name(name, _) => match bound.once.get(name) {
                Some(found) => tokens.extend(found.clone()),
                None => bail!("${name} is bound by no part of the matcher that is read here"),
            },
            Part::Repetition(inner) => {
                for round in rounds_of(inner, bound) {
                    tokens.extend(transcribed(inner, round)?);
                }
            }
            Part::Group(group, inner) => {
                let inner = transcribed(inner, bound)?;
                tokens.extend([TokenTree::Group(Group::new(group.delimiter(), inner))]);
            }
            Part::Plain(tree) => tokens.extend([tree.clone()]),
        }
    }
    Ok(tokens)
}

/// The rounds that bind the names of a repetition in a body; none where it matched nothing.
fn rounds_of<'a>(inner: &[Part], bound: &'a Bound) -> &'a [Bound] {
    fn name(parts: &[Part]) -> Option<&str> {
        parts.iter().find_map(|part| match part {
            Part::Name(name, _) => Some(name.as_str()),
            Part::Repetition(inner) | Part::Group(_, inner) => name(inner),
            Part::Plain(_) => None,
        })
    }
    let name = name(inner).unwrap_or_default();
    let binds = |rounds: &&Vec<Bound>| rounds.first().is_some_and(|r| r.once.contains_key(name));
    bound.rounds.iter().find(binds).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::Rules;
    use proc_macro2::TokenStream;

    fn expanded(rules: &str, input: &str) -> anyhow::Result<String> {
        let parse = |text: &str| text.parse::<TokenStream>().expect("tokens");
        let tokens = Rules::parse("m", &parse(rules))?.expand("m", &parse(input))?;
        Ok(tokens.to_string().replace(' ', ""))
    }

    #[test]
    fn attributes_names_and_types_are_put_in() {
        let rules = "($(#[$doc:meta])* $name:ident of $of:ty) => { $(#[$doc])* pub struct $name<'a>(&'a $of); };";
        let found = expanded(rules, "#[a] #[b(c)] Rows of Vec<u32>").expect("it expands");
        assert_eq!(found, "#[a]#[b(c)]pubstructRows<'a>(&'aVec<u32>);");
    }

    #[test]
    fn what_is_not_read_is_an_error() {
        assert!(expanded("(a) => {}; (b) => {};", "a").is_err(), "two arms");
        assert!(expanded("(a) => {};", "b").is_err(), "another word");
        assert!(expanded("($a:lifetime) => {};", "'a").is_err(), "a kind");
    }
}
